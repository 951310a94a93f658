// The driver's functions of the stand-in (nccl_stand_in.h).
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "local/device/cuda_driver_api.h"
#include "worker/transport/testing/stand_in_device.h"

namespace shardmesh {
namespace {

constexpr int kInvalidValue = kCudaInvalidValue, kNoDevice = 101, kInvalidContext = 201, kNotPermitted = 800;

std::vector<int>& Contexts() {
  thread_local std::vector<int> contexts;
  return contexts;
}

void* ContextOf(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }

}  // namespace

StandInMachine& StandInMachine::Get() {
  static auto* machine = new StandInMachine;
  return *machine;
}

int StandInMachine::CurrentDevice() { return Contexts().empty() ? -1 : Contexts().back(); }

bool StandInMachine::IsDeviceLocked(const void* memory_at, size_t bytes, int device) const {
  if (memory == StandIn::Memory::kAll || (memory == StandIn::Memory::kAllOnOdd && device % 2 == 1)) return true;
  const auto address = reinterpret_cast<uintptr_t>(memory_at);
  auto mapping = reserved.upper_bound(address);
  if (mapping != reserved.begin()) {
    const auto& [begin, range] = *--mapping;
    if (address < begin + range.bytes && address + bytes <= begin + range.bytes) {
      return range.mapped != nullptr && range.mapped->device == device;
    }
  }
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  const auto& [begin, block] = *--after;
  return address + bytes <= begin + block.bytes && address < begin + block.bytes && block.device == device;
}

bool StandInMachine::IsRegisteredLocked(const void* memory_at, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(memory_at);
  auto after = registered.upper_bound(address);
  if (after == registered.begin()) return false;
  const auto& [begin, size] = *--after;
  return address + bytes <= begin + size;
}

bool StandInMachine::BusyLocked(int device) const {
  return std::any_of(streams.begin(), streams.end(),
                     [&](const auto& stream) { return stream->device == device && !stream->tasks.empty(); });
}

void StandInMachine::PumpLocked() {
  bool moved = true;
  while (moved) {
    moved = false;
    for (const auto& stream : streams) {
      while (!stream->tasks.empty() && lost.count(stream->device) == 0) {
        StandInTask& task = *stream->tasks.front();
        if (task.work && !task.started) {
          WorkLocked(1);
          stream->threads.emplace_back([this, retained = stream->tasks.front()] {
            retained->work();
            MutexLock lock(mu);
            retained->done = true;
            WorkLocked(-1);
          });
        }
        task.started = true;
        if (task.copy) {
          WorkLocked(1);
          task.copy();
          WorkLocked(-1);
          task.done = true;
        }
        if (!task.done) break;
        stream->tasks.pop_front();
        moved = true;
      }
    }
    if (progress && progress()) moved = true;
  }
}

namespace {

int Copy(CudaAddress to, CudaAddress from, size_t bytes, StandInStream* stream) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  auto* target = reinterpret_cast<char*>(to);
  const auto* source = reinterpret_cast<const char*>(from);
  if (machine.lost.count(stream->device) > 0) return kStandInLost;
  const auto waits_for_nobody = [&](const void* memory) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return machine.IsDeviceLocked(memory, bytes, stream->device) || machine.IsRegisteredLocked(memory, bytes);
  };
  if (waits_for_nobody(target) && waits_for_nobody(source)) {
    auto task = std::make_shared<StandInTask>();
    task->copy = [=] { std::memmove(target, source, bytes); };
    stream->tasks.push_back(std::move(task));
    return kCudaSuccess;
  }
  // Memory of the host: the driver may wait for the stream.
  for (const auto& task : stream->tasks) {
    if (task->copy) continue;
    machine.MisuseLocked("a copy of host memory behind a call of NCCL or a kernel: it may wait without a time limit");
    return kNotPermitted;
  }
  machine.PumpLocked();
  machine.WorkLocked(1);
  std::memcpy(target, source, bytes);
  machine.WorkLocked(-1);
  return kCudaSuccess;
}

}  // namespace
}  // namespace shardmesh

using shardmesh::Contexts;
using shardmesh::CudaAddress;
using shardmesh::MutexLock;
using shardmesh::StandInMachine;
using shardmesh::StandInStream;

extern "C" {

int cuInit(unsigned) { return shardmesh::kCudaSuccess; }

int cuGetErrorString(int error, const char** text) {
  *text = error == shardmesh::kCudaOutOfMemory ? "out of memory"
          : error == shardmesh::kNoDevice      ? "invalid device ordinal"
          : error == shardmesh::kStandInLost   ? "unspecified launch failure"
                                               : "an error of the stand-in";
  return shardmesh::kCudaSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < shardmesh::kStandInDevices ? shardmesh::kCudaSuccess : shardmesh::kNoDevice;
}

int cuDeviceGetCount(int* count) {
  *count = shardmesh::kStandInDevices;
  return shardmesh::kCudaSuccess;
}

int cuDeviceGetUuid_v2(shardmesh::CudaUuid* uuid, int device) {
  std::memset(uuid, 0x5D, sizeof(*uuid));
  uuid->bytes[15] = static_cast<char>(device);
  return shardmesh::kCudaSuccess;
}

int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "stand-in", static_cast<size_t>(bytes));
  return shardmesh::kCudaSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = shardmesh::ContextOf(device);
  return shardmesh::kCudaSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int) { return shardmesh::kCudaSuccess; }

int cuCtxPushCurrent_v2(void* context) {
  Contexts().push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  return shardmesh::kCudaSuccess;
}

int cuCtxPopCurrent_v2(void** context) {
  if (Contexts().empty()) return shardmesh::kInvalidContext;
  *context = shardmesh::ContextOf(Contexts().back());
  Contexts().pop_back();
  return shardmesh::kCudaSuccess;
}

int cuMemAlloc_v2(CudaAddress* memory, size_t bytes) {
  if (StandInMachine::CurrentDevice() < 0) return shardmesh::kInvalidContext;
  if (StandInMachine::Get().IsLost(StandInMachine::CurrentDevice())) return shardmesh::kStandInLost;
  if (bytes > size_t{1} << 34) return shardmesh::kCudaOutOfMemory;
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  std::unique_ptr<char[]> data(new char[bytes]);
  *memory = reinterpret_cast<CudaAddress>(data.get());
  machine.blocks[*memory] = {bytes, StandInMachine::CurrentDevice(), std::move(data)};
  return shardmesh::kCudaSuccess;
}

int cuMemFree_v2(CudaAddress memory) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const auto found = machine.blocks.find(memory);
  if (found == machine.blocks.end()) return shardmesh::kInvalidValue;
  machine.PumpLocked();
  if (machine.BusyLocked(found->second.device)) machine.MisuseLocked("memory of a busy device was freed");
  machine.blocks.erase(found);
  return shardmesh::kCudaSuccess;
}

int cuMemcpyAsync(CudaAddress to, CudaAddress from, size_t bytes, void* stream) {
  if (StandInMachine::CurrentDevice() < 0) return shardmesh::kInvalidContext;
  return shardmesh::Copy(to, from, bytes, static_cast<StandInStream*>(stream));
}

int cuPointerGetAttribute(void* value, int attribute, CudaAddress memory) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  const int device = StandInMachine::CurrentDevice();
  if (device < 0 || !machine.IsDeviceLocked(reinterpret_cast<void*>(memory), 0, device))
    return shardmesh::kInvalidValue;
  const int answer = attribute == shardmesh::kCudaAttributeMemoryType ? shardmesh::kCudaMemoryTypeDevice : device;
  std::memcpy(value, &answer, sizeof(answer));
  return shardmesh::kCudaSuccess;
}

int cuStreamCreate(void** stream, unsigned) {
  if (StandInMachine::CurrentDevice() < 0) return shardmesh::kInvalidContext;
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  machine.streams.push_back(std::make_unique<StandInStream>());
  machine.streams.back()->device = StandInMachine::CurrentDevice();
  *stream = machine.streams.back().get();
  return shardmesh::kCudaSuccess;
}

int cuStreamDestroy_v2(void* stream) {
  StandInMachine& machine = StandInMachine::Get();
  std::vector<std::thread> threads;
  {
    MutexLock lock(machine.mu);
    for (auto each = machine.streams.begin(); each != machine.streams.end(); ++each) {
      if (each->get() != stream) continue;
      threads = std::move((*each)->threads);
      machine.streams.erase(each);
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  return shardmesh::kCudaSuccess;
}

int cuStreamQuery(void* stream) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  if (machine.lost.count(static_cast<StandInStream*>(stream)->device) > 0) return shardmesh::kStandInLost;
  machine.PumpLocked();
  return static_cast<StandInStream*>(stream)->tasks.empty() ? shardmesh::kCudaSuccess : shardmesh::kCudaNotReady;
}

}  // extern "C"
