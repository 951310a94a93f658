// The changes that saving a checkpoint makes to folders and files, each of them a fault point (core/base/fault_point.h,
// kFileChange), so that tests come between any two of them. Links are not followed. Thread-safe for different paths.
// Errors are those of core/base/file_error.h.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/file_error.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

absl::StatusOr<UniqueFd> MakeFile(const std::string& path);
// Room on the disk, or at least the length where the file system cannot say.
absl::Status SetLength(int fd, int64_t bytes, const std::string& path);
absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path);
absl::Status SyncFile(const std::string& path);
absl::Status RemoveFile(const std::string& path);

// With its parents, where they are not there; each of them is on the disk when this returns.
absl::Status MakeFolders(const std::string& path);
// `path` ends with XXXXXX, in place of which stands something new. Returns its path.
absl::StatusOr<std::string> MakeNewFolder(std::string path);
absl::Status SyncFolder(const std::string& path);
absl::Status Rename(const std::string& from, const std::string& to);
// With what it holds, one after the other; ends with the first that cannot be removed.
absl::Status RemoveFolder(const std::string& path);

}  // namespace shardmesh
