// The optimizer step on a CUDA device: the element rules of the reference, so the same bits. Built with --config=cuda;
// otherwise it returns Unimplemented and says so. Thread-safe. The calling thread's current device is used.
#pragma once

#include "absl/status/status.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {

// OptimizerStepReference's bits, computed on the current device in stream `stream` (a cudaStream_t; null is the default
// stream). Every pointer of the run, and the array `run.gradients` itself, is readable by the device; `context` and
// `run` are host memory and copied before the return. Asynchronous: the outputs are valid, and a failure of the kernel
// is seen, when the stream is synchronized. Unimplemented: built without CUDA,
// or int8_row weights. Internal: the launch was refused.
absl::Status OptimizerStepCuda(const OptimizerContext& context, const OptimizerRun& run, void* stream);

}  // namespace shardmesh
