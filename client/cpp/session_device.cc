#include "client/cpp/session_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kCopyTimeout = absl::Seconds(30);
}  // namespace

absl::StatusOr<std::unique_ptr<SessionDevice>> SessionDevice::Map(const v1::LocalWelcome& welcome,
                                                                  std::vector<UniqueFd> descriptors, const Plan& plan,
                                                                  const std::string& library) {
  absl::StatusOr<std::unique_ptr<DeviceRuntime>> runtime = DeviceRuntime::OpenUuid(welcome.device_uuid(), library);
  if (!runtime.ok()) {
    return Annotate(runtime.status(), absl::StrCat("the windows lie in memory of CUDA device ", welcome.device(),
                                                   " of worker ", welcome.worker()));
  }
  std::unique_ptr<SessionDevice> session(new SessionDevice(*std::move(runtime)));
  for (size_t i = 0; i < descriptors.size(); ++i) {
    const int64_t needed = i == 0 ? plan.window_bytes() : plan.gradient_window_bytes();
    const int64_t said = welcome.device_segments(static_cast<int>(i)).num_bytes();
    if (said != needed) return absl::InternalError("a window on the device has not the plan's size");
    ASSIGN_OR_RETURN(DeviceSegment segment,
                     DeviceSegment::Map(session->runtime_, std::move(descriptors[i]), said,
                                        i == 0 ? DeviceSegment::Access::kReadOnly : DeviceSegment::Access::kReadWrite));
    if (i == 0) {
      session->window_ = std::move(segment);
    } else {
      session->slots_.push_back(std::move(segment));
    }
  }
  return session;
}

absl::StatusOr<const char*> SessionDevice::OnHost(const char* from, int64_t bytes) {
  if (static_cast<int64_t>(staged_.size()) < bytes) staged_.resize(static_cast<size_t>(bytes));
  DeviceRuntime::Scope scope(*runtime_);
  RETURN_IF_ERROR(runtime_->Copy(staged_.data(), from, bytes));
  RETURN_IF_ERROR(runtime_->AwaitIdle(kCopyTimeout));
  return staged_.data();
}

}  // namespace shardmesh
