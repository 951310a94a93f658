#include "rpc/calls/refusal.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/sync.h"
#include "rpc/base/deadline.h"

namespace shardmesh {
namespace {

constexpr int kMaxConnectionAgeMs = 2000;
constexpr int kHandshakeMs = 2000;
constexpr size_t kMemoryBytes = 8 << 20;
constexpr int kReadChunkBytes = 4 << 10;

}  // namespace

absl::StatusOr<std::unique_ptr<RefusingServer>> RefusingServer::Start(const std::vector<uid_t>& users) {
  const std::set<uid_t> each(users.begin(), users.end());  // root's own server names root once
  std::unique_ptr<RefusingServer> made(new RefusingServer(absl::StrCat(
      "this server answers processes of user ", absl::StrJoin(each, " and user "),
      " alone, and this call comes from another user of the machine; run the client as that user, or give the server "
      "and its clients certificates: --tls-cert, --tls-key and --tls-ca")));
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("shardmesh-refusals");
  quota.Resize(kMemoryBytes);
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(1 << 10);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 16);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kMaxConnectionAgeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, kMaxConnectionAgeMs);
  made->to_grpc_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(&made->refusal_);
  made->server_ = BuildAndStart(builder, /*health=*/false);
  if (made->server_ == nullptr) return absl::InternalError("gRPC did not start a server; its log says why");
  return made;
}

RefusingServer::~RefusingServer() { Stop(); }

void RefusingServer::Take(int fd) {
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.fd = fd;
  to_grpc_->HandleNewConnection(&connection);
}

void RefusingServer::Stop() {
  if (server_ != nullptr) server_->Shutdown(DeadlineIn(absl::ZeroDuration()));
}

grpc::ServerGenericBidiReactor* RefusingServer::Refusal::CreateReactor(grpc::GenericCallbackServerContext*) {
  class Refused final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Refused(const std::string& text) { Finish(grpc::Status(grpc::StatusCode::PERMISSION_DENIED, text)); }
    void OnDone() override { delete this; }
  };
  return new Refused(text_);
}

std::unique_ptr<grpc::Server> BuildAndStart(grpc::ServerBuilder& builder, bool health) {
  static Mutex mu;
  MutexLock lock(mu);
  grpc::EnableDefaultHealthCheckService(health);
  return builder.BuildAndStart();
}

}  // namespace shardmesh
