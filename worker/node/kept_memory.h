// KeptMemory: memory of one job that a keeper holds too, so that the worker's next life finds it.
//
// Made anew, or taken over (`resume`): then every segment must be there as the last life made it. Everything opened is
// given to the keeper, also what was found: a keeper that comes back has to be told.
// Thread-safe. The link outlives the object.
#pragma once

#include <cstdint>
#include <string>

#include "worker/memory/memory.h"
#include "worker/node/keeper_link.h"

namespace shardmesh {

class KeptMemory final : public Memory {
 public:
  KeptMemory(KeeperLink& link, std::string job, int64_t epoch, bool resume);

  // Made anew: errors of Segment::Create; ResourceExhausted also: the keeper has no descriptor left. That no keeper is
  // there is no error: it gets the segment when it is back.
  // Taken over: FailedPrecondition: the keeper has no such segment, or one of another size. Unavailable: no keeper.
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override;

 private:
  absl::StatusOr<Segment> Find(const std::string& name, int64_t num_bytes, int64_t data_offset);

  KeeperLink& link_;
  const std::string job_;
  const int64_t epoch_;
  const bool resume_;
};

}  // namespace shardmesh
