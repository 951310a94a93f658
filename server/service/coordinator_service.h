// CoordinatorService: the coordinator behind gRPC. Validates, converts, calls the state machine under one lock,
// converts, and logs the transitions; it decides nothing. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/sync.h"
#include "core/mesh/mesh_spec.h"
#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "proto/shardmesh/v1/hosts.pb.h"
#include "rpc/calls/caller_share.h"
#include "server/coordinator/coordinator.h"
#include "server/service/job_room.h"

namespace shardmesh {

struct CoordinatorServiceOptions {
  absl::Duration heartbeat_interval = absl::Milliseconds(500);  // told to workers
  absl::Duration heartbeat_timeout = absl::Seconds(3);          // told to workers: the state machine's own
  MeshSpec default_mesh;                                        // of jobs that name none; no dimension: there is none
  // All jobs' specifications; and how many jobs there may be, as the coordinator's options say. One caller does not get
  // all of either (job_room.h).
  int64_t max_spec_bytes = int64_t{1} << 30;
  int max_jobs = CoordinatorOptions().max_jobs;
  std::function<std::string(const grpc::ServerContextBase&)> caller_key = CallerKey;
  std::function<absl::Time()> wall = [] { return absl::Now(); };  // bounds workers' incarnations, and nothing else
};

// The last heartbeat of a worker that one call of Hosts.Heartbeats had, if it may come again as a place.
struct KnownHeartbeat {
  v1::HeartbeatRequest request;
  shardmesh::Coordinator::Heard heard;
};

// What one call of Hosts.Heartbeats knows of its host.
struct KnownHost {
  uint64_t call = 0;                         // which one it is, from 1
  std::map<int, KnownHeartbeat> heartbeats;  // by place
  std::vector<int> last;                     // places of the last message that named some
  bool takes_again = false;                  // what the last reply said; then each of `last` is in `heartbeats`
  bool may_skip = false;                     // each of `last` is kept, and holds jobs
};

class CoordinatorService final : public v1::Coordinator::CallbackService {
 public:
  // `clock` must outlive the service.
  CoordinatorService(CoordinatorServiceOptions options, std::unique_ptr<shardmesh::Coordinator> coordinator,
                     const Clock& clock);

  // What Heartbeat answers to workers of a host, in their order. `host`: what this call knows of its host. It keeps small
  // heartbeats. InvalidArgument, ResourceExhausted: as Hosts.Heartbeats.
  absl::Status Heartbeats(const v1::HostHeartbeats& request, KnownHost& host, v1::HostHeartbeatReplies& replies)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Coordinator::EndCall.
  void EndCall(const KnownHost& host) ABSL_LOCKS_EXCLUDED(mu_);

  // Coordinator::Tick at the clock's time. Unavailable: the store failed; the next call tries again.
  absl::Status Tick() ABSL_LOCKS_EXCLUDED(mu_);
  // Coordinator::TickHosts at the clock's time. Errors of Tick.
  absl::Status TickHosts() ABSL_LOCKS_EXCLUDED(mu_);

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context, const v1::CreateJobRequest* request,
                                      v1::CreateJobReply* reply) override;
  grpc::ServerUnaryReactor* DescribeJob(grpc::CallbackServerContext* context, const v1::DescribeJobRequest* request,
                                        v1::JobDescription* reply) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context, const v1::ListJobsRequest* request,
                                     v1::ListJobsReply* reply) override;
  grpc::ServerUnaryReactor* DeleteJob(grpc::CallbackServerContext* context, const v1::DeleteJobRequest* request,
                                      v1::DeleteJobReply* reply) override;
  grpc::ServerUnaryReactor* ReshardJob(grpc::CallbackServerContext* context, const v1::ReshardJobRequest* request,
                                       v1::JobDescription* reply) override;
  grpc::ServerUnaryReactor* RecordCheckpoint(grpc::CallbackServerContext* context,
                                             const v1::RecordCheckpointRequest* request,
                                             v1::RecordCheckpointReply* reply) override;
  grpc::ServerUnaryReactor* ResolveNames(grpc::CallbackServerContext* context, const v1::ResolveNamesRequest* request,
                                         v1::ResolveNamesReply* reply) override;
  grpc::ServerUnaryReactor* GetPlan(grpc::CallbackServerContext* context, const v1::GetPlanRequest* request,
                                    v1::GetPlanReply* reply) override;
  grpc::ServerUnaryReactor* ListVersions(grpc::CallbackServerContext* context, const v1::ListVersionsRequest* request,
                                         v1::ListVersionsReply* reply) override;
  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context, const v1::JoinRequest* request,
                                 v1::JoinReply* reply) override;
  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context, const v1::HeartbeatRequest* request,
                                      v1::HeartbeatReply* reply) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context, const v1::LeaveRequest* request,
                                  v1::LeaveReply* reply) override;

 private:
  // Calls fn(coordinator, now) under the lock, then logs what happened without it.
  template <typename Fn>
  auto Locked(Fn fn) ABSL_LOCKS_EXCLUDED(mu_);
  bool HearAgain(const KnownHost& host) ABSL_LOCKS_EXCLUDED(mu_);
  void HearEach(const v1::HostHeartbeats& request, KnownHost& host, v1::HostHeartbeatReplies& replies)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Coordinator::CreateJob, of a job that is new where there is room for it.
  absl::StatusOr<bool> CreateWithRoom(shardmesh::Coordinator& coordinator, absl::Time now,
                                      const std::shared_ptr<const JobDefinition>& definition, int64_t uid,
                                      int64_t replaces, const std::string& caller, int64_t spec_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const CoordinatorServiceOptions options_;
  const Clock& clock_;

  Mutex mu_;
  const std::unique_ptr<shardmesh::Coordinator> coordinator_ ABSL_PT_GUARDED_BY(mu_);
  JobRoom room_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
