// ServedFleet: the coordinator as a gRPC service in a process of its own, and the heartbeats of all the workers of its
// jobs from this one, over a few connections. Workers and jobs are there when the service starts: only heartbeats
// travel.
//
// What is measured is the service's process: what a client takes is spread over the workers of a real fleet. For one
// thread.
#pragma once

#include <grpcpp/client_context.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/coordinator/fleet.h"
#include "bench/harness/process.h"
#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "proto/shardmesh/v1/hosts.grpc.pb.h"

namespace shardmesh::bench {

// The other process: makes the fleet and its jobs, serves them, writes its address to standard output, ticks as the
// coordinator does, and ends with standard input.
absl::Status ServeFleet(const FleetOptions& options);

class ServedFleet {
 public:
  // Starts this program again, which calls ServeFleet for `--serve RANKS --serve-jobs RANKS_OF_A_JOB --state FILE`.
  // Errors of Process.
  static absl::StatusOr<std::unique_ptr<ServedFleet>> Start(const FleetOptions& options);

  // Each: Internal: the coordinator's answer is wrong. Others: of the call.
  // The first heartbeat of `ranks` workers, spread over all, with their assignments; the seconds are scaled to all.
  absl::StatusOr<Cost> TakeAssignments(int ranks);
  absl::StatusOr<Cost> ReportReady();
  // `rounds` heartbeats of each worker; the cost of one of each.
  absl::StatusOr<Cost> Beat(int rounds);
  // The same; those of a host in one message of a call that stays open, each over a connection of its own. `skips`: as a
  // node, a host leaves out every second message that has nothing new; so it is 2 * `rounds`, half of them without those.
  // Errors of NewChannel; Internal: what should be left out was not.
  absl::StatusOr<Cost> BeatByHost(int rounds, bool skips);

  int64_t assignment_bytes() const { return assignment_bytes_; }  // of one reply

 private:
  explicit ServedFleet(FleetOptions options) : options_(std::move(options)) {}
  absl::Status Connect();
  // Which worker has which rank; whether the jobs are in `state`.
  absl::Status Describe(v1::JobState state);
  // Heartbeats of workers 0, stride, 2 * stride, ..., from all connections: `rounds` of each. UNSPECIFIED: they report
  // nothing, so that they are told everything.
  absl::StatusOr<Cost> CallAll(int stride, v1::MemberState state, int rounds);
  absl::Status CallShare(int connection, int stride, v1::MemberState state);
  v1::HeartbeatRequest HeartbeatOf(int worker, v1::MemberState state) const;
  struct HostCall {
    int64_t sent = -1;  // the step of the last heartbeat of rank 0
    bool takes_again = false, may_skip = false;  // what the last reply said
    bool skipped = false;                        // the last message was left out
    int64_t skips = 0;                           // that ever were
    std::unique_ptr<v1::Hosts::Stub> stub;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::HostHeartbeats, v1::HostHeartbeatReplies>> stream;
  };
  absl::StatusOr<Cost> OnAll(int rounds, const std::function<absl::Status(int connection)>& share);
  absl::Status OpenHosts();
  v1::HostHeartbeats MessageOf(int host);
  // Of hosts first, first + kConnections, ...: all are sent before the first is read.
  absl::Status HostsShare(int first, bool skips);
  absl::Status Check(int worker, const v1::HeartbeatReply& reply, bool whole);

  const FleetOptions options_;
  std::unique_ptr<Process> process_;
  std::vector<std::unique_ptr<v1::Coordinator::Stub>> stubs_;
  std::string address_;
  std::vector<std::unique_ptr<HostCall>> hosts_;
  std::vector<v1::MemberStatus> held_;  // by worker
  std::atomic<int64_t> assignment_bytes_ = 0;
  int64_t step_ = 0;
};

}  // namespace shardmesh::bench
