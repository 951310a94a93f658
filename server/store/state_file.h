// What a state file looks like from outside, before SQLite opens it for writing: whether it is ours and whole. SQLite
// itself would take an empty file for a new database, and change the journal mode of another program's.
// Not for a file that this process has open: closing it here would give up SQLite's lock. Used by sqlite_store.cc
// alone.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardmesh {

inline constexpr int64_t kStateApplicationId = 0x73686d31;  // PRAGMA application_id: "shm1"

// OK: it is not there (then `*exists` is false), or looks like a state file. It is read, and nothing is changed.
//   DataLoss: it is empty, cut, no SQLite database, or is without the write-ahead log that holds its contents.
//   FailedPrecondition: a database of another program. Unavailable: it cannot be read, or is no regular file.
absl::Status LookAtStateFile(const std::string& path, bool* exists);

// A state file has secrets in it: only its user may read it. Makes an empty one that is so, if there is none. If that
// fails SQLite says why.
void MakeHiddenFile(const std::string& path);
// Makes one that is there so, if its user and file system allow it.
void HideFile(const std::string& path);

// Until its bytes are on the disk. Errors of core/base/file_error.h.
absl::Status SyncFile(const std::string& path);

// Which file a path means.
struct FileId {
  uint64_t device = 0, inode = 0;
  friend bool operator==(const FileId& a, const FileId& b) { return a.device == b.device && a.inode == b.inode; }
};
// NotFound: there is nothing. Unavailable: the system does not say.
absl::StatusOr<FileId> FileIdOf(const std::string& path);

}  // namespace shardmesh
