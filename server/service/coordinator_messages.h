// The coordinator's values <-> the messages of coordinator.proto. Pure functions, thread-safe; requests are validated
// before. Nothing of gRPC.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {

v1::JobState ToProto(JobState state);

// Without `with_parameters` spec.parameters is left out.
v1::JobDescription ToProto(const JobView& view, bool with_parameters);

// `known`: the worker reported this assignment itself, so names and epochs are enough. What it
// lacks then is what the worker knows, the job's secret too.
v1::Assignment ToProto(const Assignment& assignment, bool known);

v1::GetPlanReply PlanToProto(const JobDefinition& definition);

WorkerIdentity IdentityFromProto(const v1::JoinRequest& request);
// Of a JoinRequest or a HeartbeatRequest.
template <class Request>
WorkerTraits TraitsFromProto(const Request& request) {
  return {request.spans_hosts(), request.has_device(), request.retained()};
}
LastIncarnation LastIncarnationFromProto(const v1::JoinRequest& request);

std::vector<MemberReport> ReportsFromProto(const v1::HeartbeatRequest& request);
std::vector<KeptCopies> CopiesFromProto(const v1::HeartbeatRequest& request);

}  // namespace shardmesh
