// The optimizer step as one CUDA kernel: a block of 256 threads walks tiles, a thread an element of each
// (kernels/optimizer_step_body.h).
#include <cuda_runtime.h>

#include "kernels/optimizer_step_body.h"
#include "kernels/optimizer_step_kernel_cuda.h"

namespace shardmesh {
namespace {

constexpr int64_t kMaxBlocks = 1 << 16;  // beyond it a block goes on with the next tile

__global__ void OptimizerStepKernel(OptimizerContext context, OptimizerRun run, StepPlan plan) {
  __shared__ BodyMemory memory;
  plan.context = &context;
  plan.run = &run;
  const int64_t num_tiles = (run.num_elements + kTileElements - 1) / kTileElements;
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    StepBody body(plan, tile, &memory);
    for (int phase = 0; phase < StepBody::kPhases; ++phase) {
      body.Phase(phase, static_cast<int>(threadIdx.x));
      __syncthreads();
    }
  }
}

}  // namespace

const char* LaunchOptimizerStep(const OptimizerContext& context, const OptimizerRun& run, const StepPlan& plan,
                                void* stream) {
  if (run.num_elements == 0) return nullptr;
  const int64_t num_tiles = (run.num_elements + kTileElements - 1) / kTileElements;
  const int blocks = static_cast<int>(num_tiles < kMaxBlocks ? num_tiles : kMaxBlocks);
  OptimizerStepKernel<<<blocks, kTileElements, 0, static_cast<cudaStream_t>(stream)>>>(context, run, plan);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace shardmesh
