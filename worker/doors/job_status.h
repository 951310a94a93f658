// What a worker says of a job that it serves: the answers to Shard.GetStatus and Shard.GetTrace. Thread-safe.
#pragma once

#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/job/job_shard.h"

namespace shardmesh {

void FillStatus(const JobShard& shard, v1::GetStatusReply::Job& status);
void FillTrace(const JobShard& shard, v1::GetTraceReply& trace);

}  // namespace shardmesh
