// Presence: a mark in a file that is there as long as the process that made it lives, and that the kernel takes away
// when it dies, however it dies: an open-file-description lock (fcntl(2)) on one byte. Works across containers, where
// process numbers do not. Thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

class Presence {
 public:
  // Marks byte `place` of a file that is open for writing (a memfd, say). AlreadyExists: somebody else holds it.
  static absl::StatusOr<Presence> Hold(int fd, int place);

  // Whether anybody but this object holds a place of its file. True also where it cannot be found out.
  bool Sees(int place) const;

 private:
  explicit Presence(UniqueFd own) : own_(std::move(own)) {}

  UniqueFd own_;  // a file description of its own: what a descriptor that was passed shares with others is no mark
};

}  // namespace shardmesh
