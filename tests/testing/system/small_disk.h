// SmallDisk: a file system of so many bytes at a folder, which this process and those that it starts see. It goes with
// the object. For a test of one thread; once it was mounted, the process stays in a mount namespace of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace shardmesh::testing {

class SmallDisk {
 public:
  // At `folder`, which it makes. Unavailable: this machine lets the process have no namespace, or mount nothing.
  static absl::StatusOr<std::unique_ptr<SmallDisk>> Mount(const std::string& folder, int64_t bytes);
  ~SmallDisk();
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

 private:
  explicit SmallDisk(std::string folder) : folder_(std::move(folder)) {}

  const std::string folder_;
};

}  // namespace shardmesh::testing
