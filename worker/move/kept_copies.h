// A member's part in the copies of a job with copies=2 (peer_copies.h): it copies its own shard after a step, takes the
// copy of the rank that it keeps one for, and reads its shard from copies if the job goes back to them. Each is for a
// thread of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/job/job_shard.h"
#include "worker/move/peer_copies.h"
#include "worker/move/reform.h"
#include "worker/move/shard_files.h"

namespace shardmesh {

struct CopyCall {
  JobShard& shard;
  PeerCopies& copies;  // of that epoch
  const v1::Assignment& assignment;
  const FetchCall& transfer;
  const std::atomic<bool>& cancelled;
  const ReportProgress& report;
};
// Shard.Copy, of a round. Errors as there, and those of `report`. The calling thread gives way to those that step, and keeps
// that priority: it is to end with the call.
absl::Status CopyShards(const CopyCall& call);

struct LoadCall {
  JobShard& shard;
  const v1::Assignment& assignment;
  const PeerCopies* kept;     // what this worker has of the copies' epoch; null: nothing
  const FetchCall& transfer;  // null: none is possible
  const std::atomic<bool>& cancelled;
  absl::Duration patience;  // how long holders that are not reached are asked again for a shard
};
// Loads a shard of a job that goes back to copies (Back.holders), as Shard.Load does; returns its digest.
//   Cancelled. Unavailable: nobody who is reached has a copy of some shard. Else errors of Health and Engine::Load.
absl::StatusOr<uint64_t> LoadKept(const LoadCall& call, uint64_t load_id);

}  // namespace shardmesh
