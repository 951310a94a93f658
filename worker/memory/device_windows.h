// DeviceWindows: of a job whose windows lie in memory of a CUDA device: the parameter window, the publications and the
// slots there, and the control block as the device sees it. HostMemory has one of these for such a job. Movable.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "local/device/device_segment.h"
#include "local/device/pinned_memory.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

struct DeviceWindows {
  // With a stream that has nothing but copies to do. It outlives what follows.
  std::shared_ptr<DeviceRuntime> device;
  DeviceSegment window;
  std::vector<DeviceSegment> publications, slots;
  PinnedMemory control;

  // One copy between the device and the host, or on the device, until it is done. Thread-safe.
  //   Unavailable: the device failed. DeadlineExceeded: it took longer than a copy may.
  absl::Status Copy(void* to, const void* from, int64_t bytes) const;

  // Adds some of these to a welcome, with the device that they are on. Their descriptors (borrowed).
  std::vector<int> DescribeTo(v1::LocalWelcome& welcome, const std::vector<const DeviceSegment*>& segments) const;

  int64_t slot_bytes() const { return BytesOf(slots); }
  int64_t publication_bytes() const { return BytesOf(publications); }

 private:
  static int64_t BytesOf(const std::vector<DeviceSegment>& segments) {
    int64_t bytes = 0;
    for (const DeviceSegment& segment : segments) bytes += segment.allocated_bytes();
    return bytes;
  }
};

}  // namespace shardmesh
