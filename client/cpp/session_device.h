// SessionDevice: what an attached session maps of a job whose windows lie in memory of a CUDA device. The trainer's own
// kernels write gradients and read weights there; a step is declared when they are done (the trainer waits for its
// streams first). Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job/plan.h"
#include "local/descriptor/fd.h"
#include "local/device/device_segment.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

class SessionDevice {
 public:
  // Finds the worker's device by its uuid and maps the windows. `descriptors`: of the welcome's device_segments.
  // `library`: of the driver, "" for the system's.
  //   Unavailable: no driver. NotFound: the device is not visible to this process. Internal: they do not fit the plan.
  static absl::StatusOr<std::unique_ptr<SessionDevice>> Map(const v1::LocalWelcome& welcome,
                                                            std::vector<UniqueFd> descriptors, const Plan& plan,
                                                            const std::string& library);

  int device() const { return runtime_->device(); }  // its number in this process
  const char* parameters() const { return reinterpret_cast<const char*>(window_.data()); }
  char* gradients(size_t slot) const { return reinterpret_cast<char*>(slots_[slot].data()); }

  // Bytes of the device, until the next call.
  absl::StatusOr<const char*> OnHost(const char* from, int64_t bytes);

 private:
  explicit SessionDevice(std::shared_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}

  const std::shared_ptr<DeviceRuntime> runtime_;
  DeviceSegment window_;
  std::vector<DeviceSegment> slots_;
  std::vector<char> staged_;
};

}  // namespace shardmesh
