// Folder: a new folder for a benchmark's files, removed with the object. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace shardmesh::bench {

class Folder {
 public:
  // In `parent`; empty: in the folder for temporary files. PermissionDenied: it cannot be made.
  static absl::StatusOr<std::unique_ptr<Folder>> Make(const std::string& parent = "");
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

}  // namespace shardmesh::bench
