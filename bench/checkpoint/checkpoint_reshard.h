// The shapes on which torch.distributed.checkpoint cannot reshard the states of torchao's AdamW8bit, and others:
// whether it can, and a job with dyn8 states of the same shapes, saved and restored on other meshes.
#pragma once

#include "absl/status/status.h"
#include "bench/checkpoint/checkpoint_rounds.h"

namespace shardmesh::bench {

// Adds a row: how many of the cases come out as they were saved; and a note with each case. Internal: ours did not.
absl::Status AddReshards(Service& service, const CheckpointSides& sides, Report& report);

}  // namespace shardmesh::bench
