// HostsService: heartbeats of all workers of a host, over one call that stays open (hosts.proto). Thread-safe.
#pragma once

#include <set>

#include "core/base/sync.h"
#include "proto/shardmesh/v1/hosts.grpc.pb.h"
#include "server/service/coordinator_service.h"

namespace shardmesh {

class HostsService final : public v1::Hosts::CallbackService {
 public:
  // `coordinator` outlives the object, and this the server.
  explicit HostsService(CoordinatorService& coordinator) : coordinator_(coordinator) {}

  grpc::ServerBidiReactor<v1::HostHeartbeats, v1::HostHeartbeatReplies>* Heartbeats(
      grpc::CallbackServerContext* context) override;

  // Cancels the calls that are open, and each that comes: before Server::Drain, which would wait for them.
  void End() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Call;

  // The call's number.
  uint64_t Began(grpc::CallbackServerContext* context) ABSL_LOCKS_EXCLUDED(mu_);
  void Ended(grpc::CallbackServerContext* context, const KnownHost& host) ABSL_LOCKS_EXCLUDED(mu_);

  CoordinatorService& coordinator_;
  Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t calls_ ABSL_GUARDED_BY(mu_) = 0;  // that ever began
  std::set<grpc::CallbackServerContext*> open_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
