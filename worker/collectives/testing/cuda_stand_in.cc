// The driver's functions of the stand-in (nccl_stand_in.h).
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "worker/collectives/cuda_driver_api.h"
#include "worker/collectives/testing/stand_in_device.h"

namespace shardmesh {
namespace {

constexpr int kInvalidValue = 1, kNoDevice = 101, kInvalidContext = 201, kNotPermitted = 800;

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
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  const auto& [begin, block] = *--after;
  return address + bytes <= begin + block.bytes && address < begin + block.bytes && block.device == device;
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
      while (!stream->tasks.empty()) {
        StandInTask& task = *stream->tasks.front();
        task.started = true;
        if (task.copy) {
          task.copy();
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
  if (machine.IsDeviceLocked(target, bytes, stream->device) && machine.IsDeviceLocked(source, bytes, stream->device)) {
    auto task = std::make_shared<StandInTask>();
    task->copy = [=] { std::memmove(target, source, bytes); };
    stream->tasks.push_back(std::move(task));
    return kCudaSuccess;
  }
  // Memory of the host: the driver may wait for the stream.
  for (const auto& task : stream->tasks) {
    if (task->copy) continue;
    machine.MisuseLocked("a copy of host memory behind a call of NCCL: it may wait without a time limit");
    return kNotPermitted;
  }
  machine.PumpLocked();
  std::memcpy(target, source, bytes);
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
                                               : "an error of the stand-in";
  return shardmesh::kCudaSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < shardmesh::kStandInDevices ? shardmesh::kCudaSuccess : shardmesh::kNoDevice;
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
  MutexLock lock(machine.mu);
  auto& all = machine.streams;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const auto& each) { return each.get() == stream; }), all.end());
  return shardmesh::kCudaSuccess;
}

int cuStreamQuery(void* stream) {
  StandInMachine& machine = StandInMachine::Get();
  MutexLock lock(machine.mu);
  machine.PumpLocked();
  return static_cast<StandInStream*>(stream)->tasks.empty() ? shardmesh::kCudaSuccess : shardmesh::kCudaNotReady;
}

}  // extern "C"

// The stand-in is of the types that the loader expects.
#define SHARDMESH_SAME(name) \
  static_assert(std::is_same_v<decltype(&cu##name), decltype(shardmesh::CudaDriverApi::name)>);
SHARDMESH_CUDA_DRIVER_FUNCTIONS(SHARDMESH_SAME)
#undef SHARDMESH_SAME
