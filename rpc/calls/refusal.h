// RefusingServer: a gRPC server that answers every call of every method with PERMISSION_DENIED. It gets the connections
// of users who may not call the real one (rpc/server.h), so that such a client learns why, and no request of it comes
// near a service. It holds each connection for a few seconds at most, in little memory. Thread-safe.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardmesh {

class RefusingServer {
 public:
  // `users`: who may call, for the message. Internal: gRPC did not start.
  static absl::StatusOr<std::unique_ptr<RefusingServer>> Start(const std::vector<uid_t>& users);
  ~RefusingServer();  // Stop()
  RefusingServer(const RefusingServer&) = delete;
  RefusingServer& operator=(const RefusingServer&) = delete;

  // Owns the connected socket `fd` from now on. Not after Stop.
  void Take(int fd);
  // Ends its connections. Call when Take is not called any more. Idempotent.
  void Stop();

 private:
  class Refusal final : public grpc::CallbackGenericService {
   public:
    explicit Refusal(std::string text) : text_(std::move(text)) {}
    grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

   private:
    const std::string text_;
  };

  explicit RefusingServer(std::string text) : refusal_(std::move(text)) {}

  Refusal refusal_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to_grpc_;
  std::unique_ptr<grpc::Server> server_;
};

// builder.BuildAndStart() with grpc.health.v1, or without: gRPC has one switch for the whole process. Null: it failed.
std::unique_ptr<grpc::Server> BuildAndStart(grpc::ServerBuilder& builder, bool health);

}  // namespace shardmesh
