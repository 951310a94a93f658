// PinnedMemory: memory of the host that a CUDA device reads and writes where it lies: registered while the object
// lives. Movable, not copyable. The runtime and the memory outlive it. Not thread-safe itself.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "local/device/device_runtime.h"

namespace shardmesh {

class PinnedMemory {
 public:
  // [memory, memory + bytes), whole pages that are registered by nobody else in this process.
  // ResourceExhausted: the host may pin no more. Unavailable: the device failed.
  static absl::StatusOr<PinnedMemory> Register(std::shared_ptr<DeviceRuntime> device, void* memory, int64_t bytes) {
    PinnedMemory pinned;
    DeviceRuntime::Scope scope(*device);
    const CudaDriverApi& api = device->api();
    int error = api.MemHostRegister_v2(memory, static_cast<size_t>(bytes),
                                       kCudaHostRegisterPortable | kCudaHostRegisterDeviceMap);
    if (error == kCudaSuccess) {
      pinned.memory_ = memory;
      pinned.device_ = device;
      error = api.MemHostGetDevicePointer_v2(&pinned.address_, memory, 0);
    }
    if (error != kCudaSuccess) return device->Failed("use memory of the host", error);
    return pinned;
  }

  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    if (this == &other) return *this;
    Close();
    device_ = std::move(other.device_);
    memory_ = std::exchange(other.memory_, nullptr);
    address_ = std::exchange(other.address_, 0);
    return *this;
  }
  ~PinnedMemory() { Close(); }

  // Where the device has what lies at `at`, in the registered memory.
  template <class Value>
  Value* OnDevice(Value* at) const {
    const auto offset = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(memory_);
    return reinterpret_cast<Value*>(address_ + offset);
  }

 private:
  void Close() {
    if (memory_ == nullptr) return;
    DeviceRuntime::Scope scope(*device_);
    device_->api().MemHostUnregister(memory_);
    memory_ = nullptr;
  }

  std::shared_ptr<DeviceRuntime> device_;
  void* memory_ = nullptr;
  CudaAddress address_ = 0;
};

}  // namespace shardmesh
