// One thread per element, grid-stride: neighbours read neighbouring numbers of each slot, once. The sum is
// core/base/reduction.h's.
#include <cuda_runtime.h>

#include "core/base/reduction.h"
#include "kernels/sum/slot_sum_cuda.h"

namespace shardmesh {
namespace {

constexpr int kThreadsPerBlock = 256;
constexpr int64_t kMaxBlocks = 1 << 16;  // beyond it the stride loop goes on

__device__ float Number(const float* slots, int64_t i) { return slots[i]; }
__device__ float Number(const uint16_t* slots, int64_t i) { return Bf16ToFloat(slots[i]); }

// Budget: 256 threads, 8 blocks; 31 registers, 128 bytes of stack, 0 of spills, 0 of shared memory.
template <class Stored>
__global__ void SlotSumKernel(const Stored* slots, int num_slots, int64_t elements, float* sum) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += stride) {
    sum[i] = TreeSum<float>(num_slots, [=](int slot) { return Number(slots, slot * elements + i); });
  }
}

}  // namespace

const char* SlotSumCuda(Format format, const void* slots, int num_slots, int64_t elements, float* sum, void* stream) {
  if (elements == 0) return nullptr;
  const int64_t needed = (elements + kThreadsPerBlock - 1) / kThreadsPerBlock;
  const auto blocks = static_cast<unsigned>(needed < kMaxBlocks ? needed : kMaxBlocks);
  const auto in = static_cast<cudaStream_t>(stream);
  if (format == Format::kFp32) {
    SlotSumKernel<<<blocks, kThreadsPerBlock, 0, in>>>(static_cast<const float*>(slots), num_slots, elements, sum);
  } else {
    SlotSumKernel<<<blocks, kThreadsPerBlock, 0, in>>>(static_cast<const uint16_t*>(slots), num_slots, elements, sum);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace shardmesh
