#include <cuda_runtime.h>

#include "kernels/cuda/device_memory_cuda.h"

namespace shardmesh {

namespace {

const char* Copy(void* to, const void* from, int64_t num_bytes, cudaMemcpyKind kind) {
  cudaError_t error = cudaDeviceSynchronize();  // reports what a kernel did before, too
  if (error == cudaSuccess) error = cudaMemcpy(to, from, num_bytes, kind);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* CudaDeviceError() {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return num_devices > 0 ? nullptr : "the driver reports no device";
}

DeviceBlock::DeviceBlock(int64_t num_bytes) {
  void* data = nullptr;
  if (cudaMalloc(&data, num_bytes) == cudaSuccess) data_ = static_cast<uint8_t*>(data);
}

DeviceBlock::~DeviceBlock() { cudaFree(data_); }

const char* DeviceBlock::CopyFromHost(const void* from, int64_t num_bytes) {
  return Copy(data_, from, num_bytes, cudaMemcpyHostToDevice);
}

const char* DeviceBlock::CopyToHost(void* to, int64_t num_bytes, int64_t offset) const {
  return Copy(to, data_ + offset, num_bytes, cudaMemcpyDeviceToHost);
}

}  // namespace shardmesh
