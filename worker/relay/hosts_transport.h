// HostsTransport: a call of Hosts.Heartbeats to the coordinator through gRPC. For one thread.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/shardmesh/v1/hosts.grpc.pb.h"
#include "rpc/tls/tls.h"
#include "worker/relay/heartbeat_relay.h"

namespace shardmesh {

class HostsTransport final : public HostsLink {
 public:
  // `timeout`: of each exchange. Connects when first used. Errors of NewChannel.
  static absl::StatusOr<std::unique_ptr<HostsTransport>> Dial(const std::string& coordinator, const TlsOptions& tls,
                                                              absl::Duration timeout);
  ~HostsTransport() override;

  absl::StatusOr<v1::HostHeartbeatReplies> Exchange(const v1::HostHeartbeats& message, bool anew) override;
  bool Stands() override;

 private:
  struct Call;

  HostsTransport(std::string address, TlsOptions tls, absl::Duration timeout, std::shared_ptr<grpc::Channel> channel);
  absl::Status Begin();
  // The call is over; why.
  absl::Status End(absl::Status cause);

  const std::string address_;
  const TlsOptions tls_;
  const absl::Duration timeout_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Hosts::Stub> stub_;
  std::unique_ptr<Call> call_;  // null: none is open
};

}  // namespace shardmesh
