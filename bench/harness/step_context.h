// What the optimizer benchmarks step with: AdamW with its defaults. Pure, thread-safe.
#pragma once

#include "bench/harness/step_formats.h"
#include "kernels/optimizer_step.h"

namespace shardmesh::bench {

OptimizerContext AdamWContext(const StepFormats& formats, int64_t step);

}  // namespace shardmesh::bench
