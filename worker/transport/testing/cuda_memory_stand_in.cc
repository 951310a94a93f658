// The driver's virtual memory management of the stand-in (nccl_stand_in.h): a handle is a memfd, a mapping of it one of
// this process, so that what processes send each other is really shared. And memory of the host that is registered.
// Codes of errors are those that driver 580 gave on an H100.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "local/device/cuda_driver_api.h"
#include "worker/transport/testing/stand_in_device.h"

namespace shardmesh {

void StandInMachine::WorkLocked(int change) {
  const bool before = working > 0;
  working += change;
  if (guarded && before != (working > 0)) ProtectLocked();
}

void StandInMachine::ProtectLocked() const {
  for (const auto& [address, range] : reserved) {
    if (range.mapped == nullptr || range.protection == 0) continue;
    mprotect(reinterpret_cast<void*>(address), range.bytes, guarded && working == 0 ? PROT_NONE : range.protection);
  }
}

}  // namespace shardmesh

using shardmesh::CudaAddress;
using shardmesh::CudaMemoryHandle;
using shardmesh::kCudaInvalidValue;
using shardmesh::kCudaSuccess;
using shardmesh::MutexLock;
using shardmesh::StandInMachine;

namespace {

bool Whole(size_t bytes) { return bytes > 0 && bytes % shardmesh::kStandInGranularity == 0; }

std::shared_ptr<StandInMachine::Handle> NewHandle(int fd, size_t bytes, int device) {
  return std::shared_ptr<StandInMachine::Handle>(new StandInMachine::Handle{fd, bytes, device},
                                                 [](StandInMachine::Handle* handle) {
                                                   close(handle->fd);
                                                   delete handle;
                                                 });
}

}  // namespace

extern "C" {

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  if (machine.lost.count(device) > 0) return shardmesh::kStandInLost;
  *value = attribute == shardmesh::kCudaHasVirtualMemory || attribute == shardmesh::kCudaHasFileDescriptors
               ? machine.has_virtual
               : 0;
  return kCudaSuccess;
}

int cuMemGetAllocationGranularity(size_t* bytes, const shardmesh::CudaAllocationProperties*, int) {
  *bytes = shardmesh::kStandInGranularity;
  return kCudaSuccess;
}

int cuMemCreate(CudaMemoryHandle* handle, size_t bytes, const shardmesh::CudaAllocationProperties* properties,
                unsigned long long) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const int device = properties->location.id;
  if (machine.lost.count(device) > 0) return shardmesh::kStandInLost;
  if (!Whole(bytes) || properties->type != 1 || properties->requested_handle_types != shardmesh::kCudaFileDescriptor) {
    return kCudaInvalidValue;
  }
  if (static_cast<int64_t>(bytes) > machine.virtual_left) return shardmesh::kCudaOutOfMemory;
  const int fd = memfd_create("stand-in", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return shardmesh::kCudaOutOfMemory;
  machine.virtual_left -= static_cast<int64_t>(bytes);
  *handle = machine.next_handle++;
  machine.handles[*handle] = NewHandle(fd, bytes, device);
  return kCudaSuccess;
}

int cuMemRelease(CudaMemoryHandle handle) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  return machine.handles.erase(handle) > 0 ? kCudaSuccess : kCudaInvalidValue;
}

int cuMemExportToShareableHandle(void* to, CudaMemoryHandle handle, int type, unsigned long long) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const auto found = machine.handles.find(handle);
  if (found == machine.handles.end() || type != shardmesh::kCudaFileDescriptor) return kCudaInvalidValue;
  const int fd = dup(found->second->fd);
  std::memcpy(to, &fd, sizeof(fd));
  return kCudaSuccess;
}

int cuMemImportFromShareableHandle(CudaMemoryHandle* handle, void* from, int type) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const int device = StandInMachine::CurrentDevice();
  if (machine.lost.count(device) > 0) return shardmesh::kStandInLost;
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(from));
  struct stat memory = {};
  if (device < 0 || type != shardmesh::kCudaFileDescriptor) return kCudaInvalidValue;
  if (fstat(fd, &memory) != 0 || !Whole(static_cast<size_t>(memory.st_size))) return shardmesh::kCudaUnknown;
  *handle = machine.next_handle++;
  machine.handles[*handle] = NewHandle(dup(fd), static_cast<size_t>(memory.st_size), device);
  return kCudaSuccess;
}

int cuMemAddressReserve(CudaAddress* address, size_t bytes, size_t, CudaAddress, unsigned long long) {
  if (!Whole(bytes)) return kCudaInvalidValue;
  void* const memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return shardmesh::kCudaOutOfMemory;
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  *address = reinterpret_cast<CudaAddress>(memory);
  machine.reserved[*address] = {bytes, nullptr, 0};
  return kCudaSuccess;
}

int cuMemAddressFree(CudaAddress address, size_t bytes) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const auto found = machine.reserved.find(address);
  if (found == machine.reserved.end() || found->second.bytes != bytes) return kCudaInvalidValue;
  if (found->second.mapped != nullptr) {
    machine.MisuseLocked("addresses were freed that are mapped");
    return kCudaInvalidValue;
  }
  munmap(reinterpret_cast<void*>(address), bytes);
  machine.reserved.erase(found);
  return kCudaSuccess;
}

int cuMemMap(CudaAddress address, size_t bytes, size_t offset, CudaMemoryHandle handle, unsigned long long) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const auto found = machine.reserved.find(address);
  const auto memory = machine.handles.find(handle);
  if (found == machine.reserved.end() || memory == machine.handles.end() || found->second.bytes != bytes ||
      offset != 0) {
    return kCudaInvalidValue;
  }
  if (found->second.mapped != nullptr) return kCudaInvalidValue;
  if (memory->second->bytes != bytes) return shardmesh::kCudaNotSupported;
  found->second.mapped = memory->second;
  return kCudaSuccess;
}

int cuMemUnmap(CudaAddress address, size_t bytes) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const auto found = machine.reserved.find(address);
  if (found == machine.reserved.end() || found->second.bytes != bytes || found->second.mapped == nullptr) {
    return kCudaInvalidValue;
  }
  // Other workers' kernels may be on the device meanwhile; one that uses these addresses ends the process.
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
       0);
  found->second.mapped = nullptr;
  found->second.protection = 0;
  return kCudaSuccess;
}

int cuMemSetAccess(CudaAddress address, size_t bytes, const shardmesh::CudaAccess* access, size_t count) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const auto found = machine.reserved.find(address);
  if (count != 1 || found == machine.reserved.end() || found->second.bytes != bytes ||
      found->second.mapped == nullptr) {
    return kCudaInvalidValue;
  }
  const int allowed = access->flags == shardmesh::kCudaReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const memory =
      mmap(reinterpret_cast<void*>(address), bytes, allowed, MAP_SHARED | MAP_FIXED, found->second.mapped->fd, 0);
  if (memory == MAP_FAILED) return kCudaInvalidValue;
  found->second.protection = allowed;
  machine.ProtectLocked();
  return kCudaSuccess;
}

int cuMemsetD8Async(CudaAddress memory, unsigned char value, size_t bytes, void* stream) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  auto& in = *static_cast<shardmesh::StandInStream*>(stream);
  if (machine.lost.count(in.device) > 0) return shardmesh::kStandInLost;
  if (!machine.IsDeviceLocked(reinterpret_cast<void*>(memory), bytes, in.device)) return kCudaInvalidValue;
  auto task = std::make_shared<shardmesh::StandInTask>();
  task->copy = [=] { std::memset(reinterpret_cast<void*>(memory), value, bytes); };
  in.tasks.push_back(std::move(task));
  return kCudaSuccess;
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const bool added = machine.registered.emplace(reinterpret_cast<uintptr_t>(memory), bytes).second;
  return added ? kCudaSuccess : shardmesh::kCudaAlreadyRegistered;
}

int cuMemHostUnregister(void* memory) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  return machine.registered.erase(reinterpret_cast<uintptr_t>(memory)) > 0 ? kCudaSuccess
                                                                           : shardmesh::kCudaNotRegistered;
}

int cuMemHostGetDevicePointer_v2(CudaAddress* address, void* memory, unsigned) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  if (!machine.IsRegisteredLocked(memory, 1)) return kCudaInvalidValue;
  *address = reinterpret_cast<CudaAddress>(memory);
  return kCudaSuccess;
}

}  // extern "C"
