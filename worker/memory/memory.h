// Memory: where a worker's segments come from. Today every worker makes its own (memfd, gone with the last process that
// holds it); a node process of the host can stand behind the same interface and hold the descriptors, so that memory
// outlives a worker. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "local/memory/segment.h"

namespace shardmesh {

class Memory {
 public:
  virtual ~Memory() = default;

  // The segment of that name: made of zeros at the first call. A node returns the same memory, with its bytes, to a
  // worker that asks again after a restart. num_bytes counts data_offset in. ResourceExhausted: there is not so much.
  virtual absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) = 0;
};

// Every Open makes a new memfd.
std::unique_ptr<Memory> NewProcessMemory();

// Every Open makes memory of this process alone, without a descriptor, and takes all of it from the
// system at once: whoever writes there does not wait for pages.
std::unique_ptr<Memory> NewPrivateMemory();

}  // namespace shardmesh
