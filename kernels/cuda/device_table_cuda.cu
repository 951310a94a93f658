#include <cuda_runtime.h>

#include <cstring>

#include "kernels/cuda/device_table_cuda.h"

namespace shardmesh {
namespace {

cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

const char* Describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

DeviceTable::DeviceTable() = default;

DeviceTable::~DeviceTable() {
  for (void* event : {copied_, used_}) {
    if (event == nullptr) continue;
    cudaEventSynchronize(Event(event));
    cudaEventDestroy(Event(event));
  }
  Free();
}

void DeviceTable::Free() {
  cudaFreeHost(pinned_);
  cudaFree(device_);
  pinned_ = nullptr;
  device_ = nullptr;
  capacity_ = 0;
}

const char* DeviceTable::Grow(int64_t num_bytes) {
  cudaError_t error = cudaSuccess;
  for (void** event : {&copied_, &used_}) {
    if (*event != nullptr) continue;
    cudaEvent_t made = nullptr;
    error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    if (error != cudaSuccess) return Describe(error);
    *event = made;
  }
  // An event that was never recorded has happened.
  error = cudaEventSynchronize(Event(copied_));
  if (error != cudaSuccess || num_bytes <= capacity_) return Describe(error);
  error = cudaEventSynchronize(Event(used_));
  Free();
  void* device = nullptr;
  const int64_t capacity = num_bytes + num_bytes / 2;
  if (error == cudaSuccess) error = cudaMallocHost(&pinned_, capacity);
  if (error == cudaSuccess) error = cudaMalloc(&device, capacity);
  if (error != cudaSuccess) {
    Free();
    return Describe(error);
  }
  device_ = static_cast<uint8_t*>(device);
  capacity_ = capacity;
  return nullptr;
}

const char* DeviceTable::Upload(const void* bytes, int64_t num_bytes, void* stream, const uint8_t** at) {
  const char* error = Grow(num_bytes);
  if (error != nullptr) return error;
  const auto in = static_cast<cudaStream_t>(stream);
  std::memcpy(pinned_, bytes, num_bytes);
  cudaError_t result = cudaStreamWaitEvent(in, Event(used_), 0);
  if (result == cudaSuccess) result = cudaMemcpyAsync(device_, pinned_, num_bytes, cudaMemcpyHostToDevice, in);
  if (result == cudaSuccess) result = cudaEventRecord(Event(copied_), in);
  *at = device_;
  return Describe(result);
}

const char* DeviceTable::NoteUse(void* stream) {
  return Describe(cudaEventRecord(Event(used_), static_cast<cudaStream_t>(stream)));
}

}  // namespace shardmesh
