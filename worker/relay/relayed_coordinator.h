// RelayedCoordinator: a worker's way to the coordinator where a relay of its host takes heartbeats. All other calls, and
// heartbeats while the relay does not answer, go to the coordinator itself. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "client/cpp/transport/coordinator_transport.h"
#include "core/base/sync.h"

namespace shardmesh {

class RelayedCoordinator final : public CoordinatorTransport {
 public:
  // `worker`: its name, for the log. `relay_lost`: called when the relay does not answer after it did. It may not call this
  // object.
  RelayedCoordinator(std::string worker, std::unique_ptr<CoordinatorTransport> coordinator,
                     std::unique_ptr<CoordinatorTransport> relay, std::function<void()> relay_lost);

  bool has_answered() const override { return coordinator_->has_answered(); }
  absl::StatusOr<v1::CreateJobReply> CreateJob(const v1::CreateJobRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::JobDescription> DescribeJob(const v1::DescribeJobRequest& request,
                                                 absl::Duration timeout) override;
  absl::StatusOr<v1::ListJobsReply> ListJobs(const v1::ListJobsRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::DeleteJobReply> DeleteJob(const v1::DeleteJobRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::JobDescription> ReshardJob(const v1::ReshardJobRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::RecordCheckpointReply> RecordCheckpoint(const v1::RecordCheckpointRequest& request,
                                                             absl::Duration timeout) override;
  absl::StatusOr<v1::ResolveNamesReply> ResolveNames(const v1::ResolveNamesRequest& request,
                                                     absl::Duration timeout) override;
  absl::StatusOr<v1::GetPlanReply> GetPlan(const v1::GetPlanRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::ListVersionsReply> ListVersions(const v1::ListVersionsRequest& request,
                                                     absl::Duration timeout) override;
  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request, absl::Duration timeout) override;
  absl::StatusOr<v1::LeaveReply> Leave(const v1::LeaveRequest& request, absl::Duration timeout) override;

 private:
  const std::string worker_;
  const std::unique_ptr<CoordinatorTransport> coordinator_, relay_;
  const std::function<void()> relay_lost_;
  Mutex mu_;
  absl::Duration patience_ ABSL_GUARDED_BY(mu_);                  // with the relay
  absl::Time again_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();  // when it is asked again
  bool direct_ ABSL_GUARDED_BY(mu_) = false;                      // it did not answer the last time
};

}  // namespace shardmesh
