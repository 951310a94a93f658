// OwnedFolder: a temporary folder that is removed with its object, and, after its process was killed, by the next one
// that makes such a folder.
//
// A file in it, "owner", is locked (flock) as long as the owner lives; a folder whose "owner" nobody has locked is left
// over. It is locked before it gets that name, so a folder without it is being made, and is left alone. Only this
// user's folders are removed. Not thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

class OwnedFolder {
 public:
  // Makes BASE/PREFIX-XXXXXX, for this user only, after removing what dead owners left under that prefix.
  // It cannot be made: errors of core/base/file_error.h.
  static absl::StatusOr<std::unique_ptr<OwnedFolder>> Create(const std::string& base, const std::string& prefix);
  ~OwnedFolder();
  OwnedFolder(const OwnedFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  explicit OwnedFolder(std::string path) : path_(std::move(path)) {}
  absl::Status Lock();

  const std::string path_;
  UniqueFd lock_;
};

}  // namespace shardmesh
