// What a job must learn: the reference kernel on whole tensors, without meshes, buckets, threads and processes; or on
// pieces of them, by ranks that reduce and gather through a group (worker/testing/numerics_oracle.h). Thread-safe.
#pragma once

#include <cstdint>

#include "core/job/job.h"
#include "tests/testing/training/training.h"
#include "worker/transport/group.h"

namespace shardmesh::testing {

// Of a job that TrainTo() of training.h trained to step `steps`. `group`: every rank calls it, and gets the same.
Learnt ReferenceOf(const JobSpec& spec, int64_t steps, Group* group = nullptr);

}  // namespace shardmesh::testing
