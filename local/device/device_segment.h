// DeviceSegment: memory of a CUDA device that several processes of a host map: one allocation of CUDA's virtual memory
// management (cuMemCreate), a descriptor of it that travels over a UNIX socket as a memfd's does, and this process's
// mapping of it. What segment.h is for memory of the host.
//
// The size is the one that was asked for, rounded up to the device's granularity; who maps says it, and the driver
// refuses another. A read-only mapping protects its owner from itself alone: a process that has the descriptor can map
// it for writing. Data is reached through the device, never by a load of the host.
// Movable, not copyable; the mapping ends with the object, the memory with its last mapping and descriptor. The runtime
// outlives it. Not thread-safe itself; the bytes are the users' business.
//
//   ASSIGN_OR_RETURN(DeviceSegment segment, DeviceSegment::Create(device, bytes));   // zeros
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "local/descriptor/fd.h"
#include "local/device/device_runtime.h"

namespace shardmesh {

class DeviceSegment {
 public:
  enum class Access { kReadOnly, kReadWrite };

  // Whether the device can have segments at all. Unimplemented: its driver has no virtual memory management, or no
  // descriptors of it.
  static absl::Status CheckSupported(const DeviceRuntime& device);

  // New memory of zeros, mapped read-write. ResourceExhausted: the device has not so much. Unimplemented: as
  // CheckSupported. Unavailable: the device failed.
  static absl::StatusOr<DeviceSegment> Create(std::shared_ptr<DeviceRuntime> device, int64_t num_bytes);
  // Maps what a peer created with `num_bytes`. InvalidArgument: the descriptor is of no such memory, or of another
  // size. Others as Create.
  static absl::StatusOr<DeviceSegment> Map(std::shared_ptr<DeviceRuntime> device, UniqueFd fd, int64_t num_bytes,
                                           Access access);

  DeviceSegment() = default;
  DeviceSegment(DeviceSegment&& other) noexcept { *this = std::move(other); }
  DeviceSegment& operator=(DeviceSegment&& other) noexcept;
  ~DeviceSegment() { Close(); }

  bool mapped() const { return address_ != 0; }
  // An address of the device, the same for all its streams in this process.
  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  int64_t num_bytes() const { return num_bytes_; }        // as asked for
  int64_t allocated_bytes() const { return allocated_; }  // of the device
  int fd() const { return fd_.get(); }

 private:
  DeviceSegment(std::shared_ptr<DeviceRuntime> device, int64_t num_bytes)
      : device_(std::move(device)), num_bytes_(num_bytes) {}
  absl::Status Round();
  absl::Status MapHandle(CudaMemoryHandle handle, Access access);
  void Close();

  std::shared_ptr<DeviceRuntime> device_;
  UniqueFd fd_;
  CudaAddress address_ = 0;
  int64_t num_bytes_ = 0, allocated_ = 0;
};

}  // namespace shardmesh
