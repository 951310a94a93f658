// SessionDevice: what an attached session, or an attached reader, maps of a job whose windows lie in memory of a CUDA
// device. The trainer's own kernels write gradients and read weights there; a step is declared when they are done (the
// trainer waits for its streams first). Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client.h"
#include "core/job/plan.h"
#include "local/descriptor/fd.h"
#include "local/device/device_segment.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

class SessionDevice {
 public:
  // Finds the worker's device by its uuid, and maps the parameter window and `slots` slots, or `publications` publications.
  // `descriptors`: of the whole welcome; those of its device_segments, at the end, are taken.
  //   Unimplemented: the options do not ask for memory of a device. Unavailable: no driver. NotFound: the device is not
  //   visible to this process. Internal: they do not fit the plan.
  static absl::StatusOr<std::unique_ptr<SessionDevice>> MapWindows(const v1::LocalWelcome& welcome,
                                                                   std::vector<UniqueFd>& descriptors, const Plan& plan,
                                                                   size_t slots, const ClientOptions& options);
  static absl::StatusOr<std::unique_ptr<SessionDevice>> MapPublications(const v1::LocalWelcome& welcome,
                                                                        std::vector<UniqueFd>& descriptors,
                                                                        const Plan& plan, size_t publications,
                                                                        const ClientOptions& options);

  int device() const { return runtime_->device(); }  // its number in this process
  const char* parameters() const { return publication(0); }
  const char* publication(size_t i) const { return reinterpret_cast<const char*>(read_[i].data()); }
  char* gradients(size_t slot) const { return reinterpret_cast<char*>(slots_[slot].data()); }

  // Bytes of the device, until the next call.
  absl::StatusOr<const char*> OnHost(const char* from, int64_t bytes);

 private:
  explicit SessionDevice(std::shared_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}
  // `otherwise`: what the caller may do who does not ask for it.
  static absl::StatusOr<std::unique_ptr<SessionDevice>> Open(const v1::LocalWelcome& welcome,
                                                             const ClientOptions& options, absl::string_view otherwise);
  // The first `read` for reading, of `plan`'s windows of weights; then as many slots.
  absl::Status Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd>& descriptors, const Plan& plan, size_t read,
                   size_t slots);

  const std::shared_ptr<DeviceRuntime> runtime_;
  std::vector<DeviceSegment> read_, slots_;
  std::vector<char> staged_;
};

}  // namespace shardmesh
