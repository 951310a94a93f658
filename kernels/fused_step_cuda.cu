// The fused step as one CUDA kernel: a thread per element, grid-stride, the body is the reference's
// (kernels/element.h). Written for sameness of bits, not for speed: a thread computes a whole Philox call and uses 16
// bits of it.
#include <cuda_runtime.h>

#include "kernels/element.h"
#include "kernels/fused_step_kernel_cuda.h"

namespace shardmesh {

namespace {

constexpr int kThreadsPerBlock = 256;
constexpr int64_t kMaxBlocks = 1 << 16;  // beyond it the stride loop goes on

__global__ void FusedStepKernel(StepContext context, FusedRun run) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < run.num_elements; i += stride) {
    StepElement(context, run, i);
  }
}

const char* Describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

const char* CudaDeviceError() {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error != cudaSuccess) return Describe(error);
  return num_devices > 0 ? nullptr : "the driver reports no device";
}

const char* LaunchFusedStep(const StepContext& context, const FusedRun& run, void* stream) {
  if (run.num_elements == 0) return nullptr;
  const int64_t needed = (run.num_elements + kThreadsPerBlock - 1) / kThreadsPerBlock;
  const int blocks = static_cast<int>(needed < kMaxBlocks ? needed : kMaxBlocks);
  FusedStepKernel<<<blocks, kThreadsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(context, run);
  return Describe(cudaGetLastError());
}

}  // namespace shardmesh
