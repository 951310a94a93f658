// The norm of all gradients of a step, from the sums of squares of their blocks. Pure, thread-safe.
#pragma once

#include "core/job/job.h"
#include "core/job/plan.h"

namespace shardmesh {

// The square root of the fixed tree sum (core/base/reduction.h) over a tensor's blocks, and then over tensors in the
// order of the job, each that has storage and elements, and is not frozen, once: so it does not depend on the mesh. One
// thread reads a float for each block and allocates nothing. `sums`: Plan::norm_blocks() of them, block b of a bucket
// at first_block + b.
double GradientNorm(const JobSpec& job, const Plan& plan, const float* sums);

}  // namespace shardmesh
