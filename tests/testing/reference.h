// What a job must learn: the reference kernel on whole tensors, without meshes, buckets, threads and processes.
// Pure, thread-safe.
#pragma once

#include <cstdint>

#include "core/job.h"
#include "tests/testing/training.h"

namespace shardmesh::testing {

// Of a job that TrainTo() of training.h trained to step `steps`.
Learnt ReferenceOf(const JobSpec& spec, int64_t steps);

}  // namespace shardmesh::testing
