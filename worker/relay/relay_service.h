// RelayService: Coordinator.Heartbeat for the workers of this host, through a HeartbeatRelay. The coordinator's other
// methods are UNIMPLEMENTED here. Thread-safe.
#pragma once

#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "worker/relay/heartbeat_relay.h"

namespace shardmesh {

class RelayService final : public v1::Coordinator::CallbackService {
 public:
  // `relay` outlives the object. Stop it before the server drains: that waits for calls.
  explicit RelayService(HeartbeatRelay& relay) : relay_(relay) {}

  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context, const v1::HeartbeatRequest* request,
                                      v1::HeartbeatReply* reply) override;

 private:
  HeartbeatRelay& relay_;
};

}  // namespace shardmesh
