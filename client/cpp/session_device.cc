#include "client/cpp/session_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kCopyTimeout = absl::Seconds(30);
}  // namespace

absl::StatusOr<std::unique_ptr<SessionDevice>> SessionDevice::Open(const v1::LocalWelcome& welcome,
                                                                   const ClientOptions& options,
                                                                   absl::string_view otherwise) {
  const std::string where =
      absl::StrCat("the windows lie in memory of CUDA device ", welcome.device(), " of worker ", welcome.worker());
  if (!options.device_windows) {
    return absl::UnimplementedError(
        absl::StrCat(where, "; set ClientOptions::device_windows to have views of it, or ", otherwise));
  }
  absl::StatusOr<std::unique_ptr<DeviceRuntime>> runtime =
      DeviceRuntime::OpenUuid(welcome.device_uuid(), options.cuda_library);
  if (!runtime.ok()) return Annotate(runtime.status(), where);
  return std::unique_ptr<SessionDevice>(new SessionDevice(*std::move(runtime)));
}

absl::Status SessionDevice::Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd>& descriptors, const Plan& plan,
                                size_t read, size_t slots) {
  const size_t count = read + slots;
  if (welcome.device_segments_size() != static_cast<int>(count) || descriptors.size() < count) {
    return absl::InternalError(absl::StrCat("the worker sent ", descriptors.size(), " descriptors and said ",
                                            welcome.device_segments_size(), " windows on its device; ", count,
                                            " expected"));
  }
  const size_t first = descriptors.size() - count;
  for (size_t i = 0; i < count; ++i) {
    const bool slot = i >= read;
    const int64_t said = welcome.device_segments(static_cast<int>(i)).num_bytes();
    if (said != (slot ? plan.gradient_window_bytes() : plan.window_bytes())) {
      return absl::InternalError(absl::StrCat("a window on the device has ", said, " bytes, not the plan's size"));
    }
    const auto access = slot ? DeviceSegment::Access::kReadWrite : DeviceSegment::Access::kReadOnly;
    ASSIGN_OR_RETURN(DeviceSegment segment,
                     DeviceSegment::Map(runtime_, std::move(descriptors[first + i]), said, access));
    (slot ? slots_ : read_).push_back(std::move(segment));
  }
  descriptors.resize(first);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SessionDevice>> SessionDevice::MapWindows(const v1::LocalWelcome& welcome,
                                                                         std::vector<UniqueFd>& descriptors,
                                                                         const Plan& plan, size_t slots,
                                                                         const ClientOptions& options) {
  ASSIGN_OR_RETURN(auto session, Open(welcome, options, "take Job::Connect, which goes through the host"));
  RETURN_IF_ERROR(session->Map(welcome, descriptors, plan, 1, slots));
  return session;
}

absl::StatusOr<std::unique_ptr<SessionDevice>> SessionDevice::MapPublications(const v1::LocalWelcome& welcome,
                                                                              std::vector<UniqueFd>& descriptors,
                                                                              const Plan& plan, size_t publications,
                                                                              const ClientOptions& options) {
  ASSIGN_OR_RETURN(auto session, Open(welcome, options, "pull versions, which go through the host"));
  RETURN_IF_ERROR(session->Map(welcome, descriptors, plan, publications, 0));
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
