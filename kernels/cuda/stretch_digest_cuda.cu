// Digests and copies of stretches as CUDA kernels: 256 threads a stretch. A tree in shared memory adds the shares of a
// digest.
#include <cuda_runtime.h>

#include "kernels/cuda/stretch_digest_launch_cuda.h"

namespace shardmesh {
namespace {

// Budget: 256 threads, 6 blocks; 40 registers, 0 bytes of stack, 0 of spills, 2048 of shared memory.
__global__ void __launch_bounds__(kStretchThreads) StretchDigestKernel(const StretchDigests args) {
  __shared__ uint64_t shares[kStretchThreads];
  const int thread = static_cast<int>(threadIdx.x), index = static_cast<int>(blockIdx.x);
  shares[thread] = ShareOfDigest(args.stretches[index], args.parity, thread, kStretchThreads);
  for (int half = kStretchThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shares[thread] += shares[thread + half];
  }
  if (thread == 0) args.digests[index] = shares[0];
}

// Budget: 256 threads, 6 blocks; 40 registers, 0 bytes of stack, 0 of spills, 0 of shared memory.
__global__ void __launch_bounds__(kStretchThreads) StretchCopyKernel(const StretchCopies args) {
  CopyShare(args.copies[blockIdx.x], static_cast<int>(threadIdx.x), kStretchThreads);
}

const char* LastError() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* LaunchStretchDigests(const StretchDigests& args, void* stream) {
  if (args.num_stretches == 0) return nullptr;
  StretchDigestKernel<<<args.num_stretches, kStretchThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return LastError();
}

const char* LaunchStretchCopies(const StretchCopies& args, void* stream) {
  if (args.num_copies == 0) return nullptr;
  StretchCopyKernel<<<args.num_copies, kStretchThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return LastError();
}

}  // namespace shardmesh
