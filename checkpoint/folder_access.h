// FolderAccess: which folders a worker writes a checkpoint into, or reads one from, for a caller that names them.
//
// A worker opens such a path as its own user, who may be able to read and write much more than the caller. So the
// caller proves that it can reach the folder by itself:
//   to save   its folder is a hidden one (".step-..."), has no manifest.json, and has a file kSecretFile that holds
//             what the request says: the saver made it for this one checkpoint, in a folder that only its user reads.
//   to load   the request has the digest and the step that the folder's manifest.json begins with.
// Whoever cannot prove that gets one and the same answer, whatever lies at the path, or does not.
//
// With roots, which the worker's administrator names, the folder must lie below one of them as well, and no part of the
// path below the root may be a link: each is opened in the one before. Without roots any folder will do.
//
// Immutable and thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

inline constexpr char kSecretFile[] = "saver.secret";
inline constexpr size_t kSecretBytes = 32;  // hexadecimal digits of 128 random bits

std::string NewSecret();

class FolderAccess {
 public:
  FolderAccess() = default;
  // InvalidArgument: a root that is empty, or has "." or ".." in it. NotFound, PermissionDenied: it is no folder that
  // can be opened. A relative root is below the working directory.
  static absl::StatusOr<FolderAccess> Create(const std::vector<std::string>& roots);

  // The folder, to open files in (openat). PermissionDenied: the caller has not proved that it saves there, or it lies
  // below no root. InvalidArgument: a path that is not absolute, or has "." or ".." in it.
  absl::StatusOr<UniqueFd> OpenToSave(const std::string& folder, absl::string_view secret) const;
  absl::StatusOr<UniqueFd> OpenToLoad(const std::string& folder, int64_t step, uint64_t digest) const;

 private:
  absl::StatusOr<UniqueFd> Open(const std::string& folder) const;

  std::vector<std::string> roots_;  // absolute, without a slash at the end
};

}  // namespace shardmesh
