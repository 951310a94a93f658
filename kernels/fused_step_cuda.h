// The fused step on a CUDA device: the element rules of the reference, so the same bits. Built with --config=cuda;
// otherwise every function here returns kUnimplemented and says so.
// Thread-safe. The calling thread's current device is used and not changed.
#pragma once

#include "absl/status/status.h"
#include "kernels/fused_step.h"

namespace shardmesh {

// OK when this build has CUDA, a driver answers and there is a device. kUnimplemented: built without CUDA;
// kUnavailable: no driver or no device (the driver's words are in the message).
absl::Status CudaAvailable();

// FusedStepReference's bits, computed on the current device in stream `stream` (a cudaStream_t; null is the default
// stream). Every pointer of the run, and the array `run.gradients` itself, is readable by the device (device, managed
// or registered memory); `context` and `run` themselves are host memory and copied before the return. Asynchronous: the
// outputs are valid, and a failure of the kernel is seen, when the stream is synchronized.
// kUnimplemented: as above; kInternal: the launch was refused (the runtime's words are in the message).
absl::Status FusedStepCuda(const StepContext& context, const FusedRun& run, void* stream);

}  // namespace shardmesh
