// The part of the CUDA driver's C interface that is used here, so that neither its header nor the driver is needed to
// build. Taken from cuda.h of CUDA 13.0 (https://docs.nvidia.com/cuda/cuda-driver-api): values and layouts are part of
// the driver's binary interface. A function's name in the library begins with "cu"; a result is a CUresult.
#pragma once

#include <cstddef>

namespace shardmesh {

inline constexpr int kCudaSuccess = 0, kCudaInvalidValue = 1, kCudaOutOfMemory = 2, kCudaNotReady = 600;
inline constexpr int kCudaNotSupported = 801, kCudaUnknown = 999;
inline constexpr int kCudaAlreadyRegistered = 712, kCudaNotRegistered = 713;         // memory of the host
inline constexpr int kCudaAttributeMemoryType = 2, kCudaAttributeDeviceOrdinal = 9;  // CUpointer_attribute
inline constexpr unsigned kCudaMemoryTypeDevice = 2;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
// CUdevice_attribute: virtual memory management, and handles of it that are file descriptors.
inline constexpr int kCudaHasVirtualMemory = 102, kCudaHasFileDescriptors = 103;
inline constexpr unsigned kCudaHostRegisterPortable = 1, kCudaHostRegisterDeviceMap = 2;

using CudaAddress = unsigned long long;       // CUdeviceptr, on 64-bit machines
using CudaMemoryHandle = unsigned long long;  // CUmemGenericAllocationHandle

struct CudaUuid {
  char bytes[16];
};

struct CudaMemoryLocation {
  int type = 1;  // a device
  int id = 0;
};
// CUmemAllocationProp_v1.
struct CudaAllocationProperties {
  int type = 1;                    // pinned: the only one
  int requested_handle_types = 1;  // a file descriptor
  CudaMemoryLocation location;
  void* win32_handle_metadata = nullptr;
  unsigned char compression_type = 0, gpu_direct_rdma_capable = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
static_assert(sizeof(CudaAllocationProperties) == 32);
inline constexpr int kCudaFileDescriptor = 1;  // CUmemAllocationHandleType
inline constexpr int kCudaReadOnly = 1, kCudaReadWrite = 3;
struct CudaAccess {
  CudaMemoryLocation location;
  int flags = kCudaReadWrite;
};

struct CudaDriverApi {
  int (*Init)(unsigned flags);
  int (*GetErrorString)(int error, const char** text);
  int (*DeviceGet)(int* device, int ordinal);
  int (*DeviceGetCount)(int* count);
  int (*DeviceGetUuid_v2)(CudaUuid* uuid, int device);
  int (*DeviceGetName)(char* name, int bytes, int device);
  int (*DeviceGetAttribute)(int* value, int attribute, int device);
  int (*DevicePrimaryCtxRetain)(void** context, int device);
  int (*DevicePrimaryCtxRelease_v2)(int device);
  int (*CtxPushCurrent_v2)(void* context);
  int (*CtxPopCurrent_v2)(void** context);
  int (*MemAlloc_v2)(CudaAddress* memory, size_t bytes);
  int (*MemFree_v2)(CudaAddress memory);
  int (*MemcpyAsync)(CudaAddress to, CudaAddress from, size_t bytes, void* stream);
  int (*MemsetD8Async)(CudaAddress memory, unsigned char value, size_t bytes, void* stream);
  int (*PointerGetAttribute)(void* value, int attribute, CudaAddress memory);
  int (*StreamCreate)(void** stream, unsigned flags);
  int (*StreamDestroy_v2)(void* stream);
  int (*StreamQuery)(void* stream);
  int (*MemGetAllocationGranularity)(size_t* bytes, const CudaAllocationProperties* properties, int option);
  int (*MemCreate)(CudaMemoryHandle* handle, size_t bytes, const CudaAllocationProperties* properties,
                   unsigned long long flags);
  int (*MemRelease)(CudaMemoryHandle handle);
  int (*MemAddressReserve)(CudaAddress* address, size_t bytes, size_t alignment, CudaAddress wish,
                           unsigned long long flags);
  int (*MemAddressFree)(CudaAddress address, size_t bytes);
  int (*MemMap)(CudaAddress address, size_t bytes, size_t offset, CudaMemoryHandle handle, unsigned long long flags);
  int (*MemUnmap)(CudaAddress address, size_t bytes);
  int (*MemSetAccess)(CudaAddress address, size_t bytes, const CudaAccess* access, size_t count);
  int (*MemExportToShareableHandle)(void* to, CudaMemoryHandle handle, int type, unsigned long long flags);
  int (*MemImportFromShareableHandle)(CudaMemoryHandle* handle, void* from, int type);
  int (*MemHostRegister_v2)(void* memory, size_t bytes, unsigned flags);
  int (*MemHostUnregister)(void* memory);
  int (*MemHostGetDevicePointer_v2)(CudaAddress* address, void* memory, unsigned flags);
};

// Calls f(name) for each.
#define SHARDMESH_CUDA_DRIVER_FUNCTIONS(f)                                                                            \
  f(Init) f(GetErrorString) f(DeviceGet) f(DeviceGetCount) f(DeviceGetUuid_v2) f(DeviceGetName) f(DeviceGetAttribute) \
      f(DevicePrimaryCtxRetain) f(DevicePrimaryCtxRelease_v2) f(CtxPushCurrent_v2) f(CtxPopCurrent_v2) f(MemAlloc_v2) \
          f(MemFree_v2) f(MemcpyAsync) f(MemsetD8Async) f(PointerGetAttribute) f(StreamCreate) f(StreamDestroy_v2)    \
              f(StreamQuery) f(MemGetAllocationGranularity) f(MemCreate) f(MemRelease) f(MemAddressReserve)           \
                  f(MemAddressFree) f(MemMap) f(MemUnmap) f(MemSetAccess) f(MemExportToShareableHandle)               \
                      f(MemImportFromShareableHandle) f(MemHostRegister_v2) f(MemHostUnregister)                      \
                          f(MemHostGetDevicePointer_v2)

}  // namespace shardmesh
