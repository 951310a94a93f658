// The optimizer step on a CUDA device: the element rules of the reference, so the same bits. Built with --config=cuda;
// otherwise everything here returns Unimplemented and says so. Thread-safe, but for a DeviceTable, which one thread
// uses at a time. The calling thread's current device is used.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/step_list.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {

class DeviceTable;  // kernels/cuda/device_table_cuda.h

// OptimizerStepReference's bits, computed on the current device in stream `stream` (a cudaStream_t; null is the default
// stream). Every pointer of the run, and the array `run.gradients` itself, is readable by the device; `context` and
// `run` are host memory and copied before the return; CheckRun holds of them. Asynchronous: the outputs are valid, and
// a failure of the kernel is seen, when the stream is synchronized. Unimplemented: built without CUDA. Internal: the
// launch was refused.
absl::Status OptimizerStepCuda(const OptimizerContext& context, const OptimizerRun& run, void* stream);

// The same for a list of runs (a bucket's parameters), each with its parameter group's context, in one launch. Fastest
// where all runs have the same formats, the optimizer is Adam or AdamW, and addresses are multiples of 16. `contexts`
// and `items` are copied before the return; their tables travel through `table`, which must live until the stream has
// come past the launch (its destructor waits for that) and may be used again at once. Errors as above; InvalidArgument:
// an item names no context. Nothing was launched then.
absl::Status OptimizerStepListCuda(absl::Span<const OptimizerContext> contexts, absl::Span<const OptimizerItem> items,
                                   DeviceTable& table, void* stream);

}  // namespace shardmesh
