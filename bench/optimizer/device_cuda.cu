#include <cuda_runtime.h>

#include <cstdio>

#include "bench/harness/step_formats.h"
#include "bench/optimizer/device_cuda.h"

namespace shardmesh::bench {
namespace {

constexpr int kThreads = 256;

const char* Describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }
cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

int Blocks(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < (1 << 16) ? blocks : 1 << 16);
}

__global__ void CopyKernel(uint4* to, const uint4* from, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) to[i] = from[i];
}

__global__ void FillKernel(StartKind kind, bool wide, uint32_t first, int64_t n, void* to) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const uint32_t element = first + static_cast<uint32_t>(i);
    const float x = kind == StartKind::kWeight ? StartWeight(element) : StartGradient(element);
    if (wide) {
      static_cast<float*>(to)[i] = x;
    } else {
      static_cast<uint16_t*>(to)[i] = FloatToBf16Rne(x);
    }
  }
}

}  // namespace

std::string DescribeDevice() {
  int device = 0, driver = 0;
  cudaDeviceProp properties;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    return "";
  }
  char text[400];
  std::snprintf(text, sizeof(text), "%s, sm_%d%d, %.1f GiB, driver of CUDA %d.%d", properties.name, properties.major,
                properties.minor, static_cast<double>(properties.totalGlobalMem) / (1 << 30), driver / 1000,
                driver % 1000 / 10);
  return text;
}

DeviceTimer::DeviceTimer() {
  for (void** event : {&start_, &stop_}) {
    cudaEvent_t made = nullptr;
    if (cudaEventCreate(&made) == cudaSuccess) *event = made;
  }
}

DeviceTimer::~DeviceTimer() {
  for (void* event : {start_, stop_}) {
    if (event != nullptr) cudaEventDestroy(Event(event));
  }
}

const char* DeviceTimer::Start(void* stream) {
  if (start_ == nullptr || stop_ == nullptr) return "there are no events";
  return Describe(cudaEventRecord(Event(start_), static_cast<cudaStream_t>(stream)));
}

const char* DeviceTimer::Mark(void* stream) {
  return Describe(cudaEventRecord(Event(stop_), static_cast<cudaStream_t>(stream)));
}

const char* DeviceTimer::Seconds(double* seconds) {
  float milliseconds = 0;
  cudaError_t error = cudaEventSynchronize(Event(stop_));
  if (error == cudaSuccess) error = cudaEventElapsedTime(&milliseconds, Event(start_), Event(stop_));
  *seconds = 1e-3 * milliseconds;
  return Describe(error);
}

const char* DeviceTimer::Stop(double* seconds) {
  const char* const error = Mark();
  return error != nullptr ? error : Seconds(seconds);
}

const char* CopyByDriver(void* to, const void* from, int64_t num_bytes) {
  return Describe(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice));
}

const char* CopyByKernel(void* to, const void* from, int64_t num_bytes) {
  const int64_t n = num_bytes / static_cast<int64_t>(sizeof(uint4));
  CopyKernel<<<Blocks(n), kThreads>>>(static_cast<uint4*>(to), static_cast<const uint4*>(from), n);
  return Describe(cudaGetLastError());
}

const char* FillStart(StartKind kind, bool wide, uint32_t first, int64_t n, void* to) {
  FillKernel<<<Blocks(n), kThreads>>>(kind, wide, first, n, to);
  return Describe(cudaGetLastError());
}

const char* FillZero(void* to, int64_t num_bytes) { return Describe(cudaMemsetAsync(to, 0, num_bytes)); }

}  // namespace shardmesh::bench
