// CoordinatorTransport: the coordinator's methods, one each, as plain calls with a time limit. The gRPC implementation
// is the product's; tests have one in the process. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/shardmesh/v1/coordinator.pb.h"

namespace shardmesh {

struct TlsOptions;

class CoordinatorTransport {
 public:
  virtual ~CoordinatorTransport() = default;
  // Whether a call was ever answered: then a coordinator that is not there is away, and its address is right.
  virtual bool has_answered() const { return false; }
  // Each: the service's status, or Unavailable / DeadlineExceeded of the transport, naming the coordinator's address.
  virtual absl::StatusOr<v1::CreateJobReply> CreateJob(const v1::CreateJobRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::JobDescription> DescribeJob(const v1::DescribeJobRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::ListJobsReply> ListJobs(const v1::ListJobsRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::DeleteJobReply> DeleteJob(const v1::DeleteJobRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::JobDescription> ReshardJob(const v1::ReshardJobRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::RecordCheckpointReply> RecordCheckpoint(const v1::RecordCheckpointRequest&,
                                                                     absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::ResolveNamesReply> ResolveNames(const v1::ResolveNamesRequest&,
                                                             absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::GetPlanReply> GetPlan(const v1::GetPlanRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::ListVersionsReply> ListVersions(const v1::ListVersionsRequest&,
                                                             absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest&, absl::Duration timeout) = 0;
  virtual absl::StatusOr<v1::LeaveReply> Leave(const v1::LeaveRequest&, absl::Duration timeout) = 0;
};

// Errors of NewChannel. Connects when first called; goes on after the coordinator was restarted.
absl::StatusOr<std::unique_ptr<CoordinatorTransport>> NewGrpcCoordinatorTransport(const std::string& address,
                                                                                  const TlsOptions& tls);

}  // namespace shardmesh
