// FakeCoordinator: a coordinator in the test's own process, which answers what the test wants. Tests only.
#pragma once

#include <gmock/gmock.h>

#include "client/cpp/transport/coordinator_transport.h"

namespace shardmesh {

class FakeCoordinator : public CoordinatorTransport {
 public:
#define SHARDMESH_FAKE(name, Request, Reply) \
  MOCK_METHOD(absl::StatusOr<v1::Reply>, name, (const v1::Request&, absl::Duration), (override))
  SHARDMESH_FAKE(CreateJob, CreateJobRequest, CreateJobReply);
  SHARDMESH_FAKE(DescribeJob, DescribeJobRequest, JobDescription);
  SHARDMESH_FAKE(ListJobs, ListJobsRequest, ListJobsReply);
  SHARDMESH_FAKE(DeleteJob, DeleteJobRequest, DeleteJobReply);
  SHARDMESH_FAKE(ReshardJob, ReshardJobRequest, JobDescription);
  SHARDMESH_FAKE(RecordCheckpoint, RecordCheckpointRequest, RecordCheckpointReply);
  SHARDMESH_FAKE(ResolveNames, ResolveNamesRequest, ResolveNamesReply);
  SHARDMESH_FAKE(GetPlan, GetPlanRequest, GetPlanReply);
  SHARDMESH_FAKE(ListVersions, ListVersionsRequest, ListVersionsReply);
  SHARDMESH_FAKE(Join, JoinRequest, JoinReply);
  SHARDMESH_FAKE(Heartbeat, HeartbeatRequest, HeartbeatReply);
  SHARDMESH_FAKE(Leave, LeaveRequest, LeaveReply);
#undef SHARDMESH_FAKE
};

}  // namespace shardmesh
