// The part of the CUDA driver's C interface that is used here, so that neither its header nor the driver is needed to
// build. Taken from cuda.h of CUDA 13.0 (https://docs.nvidia.com/cuda/cuda-driver-api): values and layouts are part of
// the driver's binary interface. A function's name in the library begins with "cu"; a result is a CUresult.
#pragma once

#include <cstddef>

namespace shardmesh {

inline constexpr int kCudaSuccess = 0, kCudaOutOfMemory = 2, kCudaNotReady = 600;
inline constexpr int kCudaAttributeMemoryType = 2, kCudaAttributeDeviceOrdinal = 9;  // CUpointer_attribute
inline constexpr unsigned kCudaMemoryTypeDevice = 2;
inline constexpr unsigned kCudaStreamNonBlocking = 1;

using CudaAddress = unsigned long long;  // CUdeviceptr, on 64-bit machines

struct CudaDriverApi {
  int (*Init)(unsigned flags);
  int (*GetErrorString)(int error, const char** text);
  int (*DeviceGet)(int* device, int ordinal);
  int (*DevicePrimaryCtxRetain)(void** context, int device);
  int (*DevicePrimaryCtxRelease_v2)(int device);
  int (*CtxPushCurrent_v2)(void* context);
  int (*CtxPopCurrent_v2)(void** context);
  int (*MemAlloc_v2)(CudaAddress* memory, size_t bytes);
  int (*MemFree_v2)(CudaAddress memory);
  int (*MemcpyAsync)(CudaAddress to, CudaAddress from, size_t bytes, void* stream);
  int (*PointerGetAttribute)(void* value, int attribute, CudaAddress memory);
  int (*StreamCreate)(void** stream, unsigned flags);
  int (*StreamDestroy_v2)(void* stream);
  int (*StreamQuery)(void* stream);
};

// Calls f(name) for each.
#define SHARDMESH_CUDA_DRIVER_FUNCTIONS(f)                                                                            \
  f(Init) f(GetErrorString) f(DeviceGet) f(DevicePrimaryCtxRetain) f(DevicePrimaryCtxRelease_v2) f(CtxPushCurrent_v2) \
      f(CtxPopCurrent_v2) f(MemAlloc_v2) f(MemFree_v2) f(MemcpyAsync) f(PointerGetAttribute) f(StreamCreate)          \
          f(StreamDestroy_v2) f(StreamQuery)

}  // namespace shardmesh
