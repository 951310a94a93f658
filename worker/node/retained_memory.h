// RetainedMemory: memory of one job that a node holds too, so that the worker's next incarnation finds it.
//
// Made anew, or taken over (`resume`): then every segment must be there as the last incarnation made it. Everything
// opened is given to the node, also what was found: a node that comes back has to be told.
// Thread-safe. The link outlives the object.
#pragma once

#include <cstdint>
#include <string>

#include "worker/memory/memory.h"
#include "worker/node/node_link.h"

namespace shardmesh {

class RetainedMemory final : public Memory {
 public:
  RetainedMemory(NodeLink& link, std::string job, int64_t epoch, bool resume);

  // Made anew: errors of Segment::Create; ResourceExhausted also: the node has no descriptor left. That no node is
  // there is no error: it gets the segment when it is back.
  // Taken over: FailedPrecondition: the node has no such segment, or one of another size. Unavailable: no node.
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override;

 private:
  absl::StatusOr<Segment> Find(const std::string& name, int64_t num_bytes, int64_t data_offset);

  NodeLink& link_;
  const std::string job_;
  const int64_t epoch_;
  const bool resume_;
};

}  // namespace shardmesh
