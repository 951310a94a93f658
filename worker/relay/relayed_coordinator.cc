#include "worker/relay/relayed_coordinator.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLongest = absl::Seconds(1), kAway = absl::Seconds(5);
// Of the time after which the coordinator takes a silent worker for dead: there has to be some left for the call itself.
constexpr int kPartOfTimeout = 6;

// Whether that is the coordinator's answer to a heartbeat, and not the relay's that it has none.
bool IsCoordinators(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition:
      return true;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kPermissionDenied:
      return NextIncarnationOf(status).has_value();
    default:
      return false;
  }
}

}  // namespace

RelayedCoordinator::RelayedCoordinator(std::string worker, std::unique_ptr<CoordinatorTransport> coordinator,
                                       std::unique_ptr<CoordinatorTransport> relay, std::function<void()> relay_lost)
    : worker_(std::move(worker)),
      coordinator_(std::move(coordinator)),
      relay_(std::move(relay)),
      relay_lost_(std::move(relay_lost)),
      patience_(kLongest) {}

absl::StatusOr<v1::JoinReply> RelayedCoordinator::Join(const v1::JoinRequest& request, absl::Duration timeout) {
  ASSIGN_OR_RETURN(v1::JoinReply reply, coordinator_->Join(request, timeout));
  MutexLock lock(mu_);
  patience_ = std::min(kLongest, absl::Milliseconds(reply.heartbeat_timeout_ms()) / kPartOfTimeout);
  return reply;
}

absl::StatusOr<v1::HeartbeatReply> RelayedCoordinator::Heartbeat(const v1::HeartbeatRequest& request,
                                                                 absl::Duration timeout) {
  absl::Duration patience;
  {
    MutexLock lock(mu_);
    if (MonotonicNow() >= again_) patience = std::min(patience_, timeout / 2);
  }
  if (patience > absl::ZeroDuration()) {
    absl::StatusOr<v1::HeartbeatReply> reply = relay_->Heartbeat(request, patience);
    const bool relayed = IsCoordinators(reply.status());
    MutexLock lock(mu_);
    again_ = relayed ? absl::InfinitePast() : MonotonicNow() + kAway;
    if (std::exchange(direct_, !relayed) == relayed) {
      if (relayed) {
        spdlog::info("event=heartbeats_relayed_again worker={}", worker_);
      } else {
        spdlog::warn("event=heartbeats_not_relayed worker={} error=\"{}\"", worker_, reply.status().ToString());
        relay_lost_();
      }
    }
    if (relayed) return reply;
  }
  return coordinator_->Heartbeat(request, timeout - patience);
}

#define SHARDMESH_FORWARD(name, Request, Reply)                                                    \
  absl::StatusOr<Reply> RelayedCoordinator::name(const Request& request, absl::Duration timeout) { \
    return coordinator_->name(request, timeout);                                                   \
  }
SHARDMESH_FORWARD(CreateJob, v1::CreateJobRequest, v1::CreateJobReply)
SHARDMESH_FORWARD(DescribeJob, v1::DescribeJobRequest, v1::JobDescription)
SHARDMESH_FORWARD(ListJobs, v1::ListJobsRequest, v1::ListJobsReply)
SHARDMESH_FORWARD(DeleteJob, v1::DeleteJobRequest, v1::DeleteJobReply)
SHARDMESH_FORWARD(ReshardJob, v1::ReshardJobRequest, v1::JobDescription)
SHARDMESH_FORWARD(RecordCheckpoint, v1::RecordCheckpointRequest, v1::RecordCheckpointReply)
SHARDMESH_FORWARD(ResolveNames, v1::ResolveNamesRequest, v1::ResolveNamesReply)
SHARDMESH_FORWARD(GetPlan, v1::GetPlanRequest, v1::GetPlanReply)
SHARDMESH_FORWARD(ListVersions, v1::ListVersionsRequest, v1::ListVersionsReply)
SHARDMESH_FORWARD(Leave, v1::LeaveRequest, v1::LeaveReply)
#undef SHARDMESH_FORWARD

}  // namespace shardmesh
