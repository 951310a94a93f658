#include "rpc/server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <spdlog/spdlog.h>

#include <climits>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "rpc/base/address.h"
#include "rpc/base/deadline.h"
#include "rpc/base/library_log.h"
#include "rpc/calls/call_tracking.h"
#include "rpc/connections/listener.h"
#include "rpc/tls/tls_files.h"

namespace shardmesh {
namespace {

absl::Status InRange(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, "; give ", least, "..", most));
}

absl::Status Validate(const ServerOptions& o) {
  constexpr int64_t kMaxMs = INT_MAX;
  RETURN_IF_ERROR(InRange("max_connections", o.max_connections, 1, 1 << 20));
  RETURN_IF_ERROR(InRange("max_connections_per_peer", o.max_connections_per_peer, 1, 1 << 20));
  RETURN_IF_ERROR(InRange("reserved_descriptors", o.reserved_descriptors, 0, 1 << 20));
  RETURN_IF_ERROR(InRange("max_concurrent_streams", o.max_concurrent_streams, 1, 1 << 20));
  RETURN_IF_ERROR(InRange("max_message_bytes", o.max_message_bytes, 1, INT_MAX));
  RETURN_IF_ERROR(InRange("memory_quota_bytes", o.memory_quota_bytes, 1 << 20, int64_t{1} << 50));
  RETURN_IF_ERROR(InRange("max_metadata_bytes", o.max_metadata_bytes, 1 << 10, 1 << 20));
  RETURN_IF_ERROR(InRange("keepalive_time in ms", absl::ToInt64Milliseconds(o.keepalive_time), 100, kMaxMs));
  RETURN_IF_ERROR(InRange("keepalive_timeout in ms", absl::ToInt64Milliseconds(o.keepalive_timeout), 100, kMaxMs));
  RETURN_IF_ERROR(InRange("max_connection_idle in ms", absl::ToInt64Milliseconds(o.max_connection_idle), 100, kMaxMs));
  RETURN_IF_ERROR(InRange("most_bytes_without_call", o.most_bytes_without_call, 1, int64_t{1} << 50));
  if (o.users.empty()) return absl::InvalidArgumentError("no user may call; give this process's own at least");
  return InRange("handshake_timeout in ms", absl::ToInt64Milliseconds(o.handshake_timeout), 100, kMaxMs);
}

// An honest client opens a new stream as soon as it has the answer of the last, which may be before gRPC has released
// that call, and may have reset streams whose handlers still run.
constexpr int kOpenCallsPerStream = 4;

// Of Drain: without a call for so long, a connection is quiet.
constexpr absl::Duration kQuiet = absl::Milliseconds(200);
constexpr absl::Duration kLook = absl::Milliseconds(10);

int Milliseconds(absl::Duration d) { return static_cast<int>(absl::ToInt64Milliseconds(d)); }

void SetLimits(const ServerOptions& o, grpc::ServerBuilder& builder) {
  grpc::ResourceQuota quota("shardmesh-server");
  quota.Resize(static_cast<size_t>(o.memory_quota_bytes));
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(static_cast<int>(o.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, o.max_concurrent_streams);
  if (o.read_chunk_bytes > 0) builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, o.read_chunk_bytes);
  if (!o.measures_bandwidth) builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, o.max_metadata_bytes);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(o.handshake_timeout));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(o.max_connection_idle));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(o.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(o.keepalive_timeout));
  // Clients ping without calls too, as often as twice a second (channel.h); a ping flood still ends the connection.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 5);
  // A few kilobytes of zeros expand to any size: only identity is accepted.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Credentials(const ServerOptions& options,
                                                                     const Address& address) {
  if (!address.is_local() && !options.tls.enabled()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen ", address.ToString(), " can be reached from other machines, so TLS is needed: ",
                     HowToGiveTls(options.tls), ", or listen on 127.0.0.1 or unix:/path"));
  }
  if (address.is_unix() || !options.tls.enabled()) return grpc::InsecureServerCredentials();
  return NewServerCredentials(options.tls);
}

// Whether the user of the peer's process decides who is served: where no certificate does.
bool UsersDecide(const ServerOptions& options, const Address& address) {
  return address.is_unix() || !options.tls.enabled();
}

void WarnOfTlsFiles(const ServerOptions& options, const Address& address) {
  if (UsersDecide(options, address)) return;
  for (const std::string& warning : TlsFileWarnings(options.tls.cert_file, options.tls.key_file, absl::Now())) {
    spdlog::warn("event=tls_files_unsafe warning=\"{}\"", absl::CHexEscape(warning));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      const std::vector<grpc::Service*>& services) {
  RETURN_IF_ERROR(Validate(options));
  ASSIGN_OR_RETURN(const Address address, ParseAddress(options.listen));
  ASSIGN_OR_RETURN(auto credentials, Credentials(options, address));
  ASSIGN_OR_RETURN(auto listener, Listener::Open(address));
  RouteLibraryLogs();
  WarnOfTlsFiles(options, address);

  std::unique_ptr<Server> server(new Server);
  server->address_ = listener->address();
  server->call_guard_ = std::make_shared<CallGuard>(kOpenCallsPerStream * options.max_concurrent_streams);
  grpc::ServerBuilder builder;
  SetLimits(options, builder);
  for (grpc::Service* service : services) builder.RegisterService(service);
  server->to_grpc_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, std::move(credentials));
  TrackCalls(server->call_guard_, builder);
  builder.RegisterCallbackGenericService(&server->reflection_);
  server->reflection_.AddTo(builder);
  server->server_ = BuildAndStart(builder, /*health=*/true);
  if (server->server_ == nullptr) {
    return absl::InternalError(
        absl::StrCat("gRPC did not start a server on ", address.ToString(), "; its log says why"));
  }
  AcceptorGuards guards;
  if (UsersDecide(options, address)) {
    ASSIGN_OR_RETURN(server->refusing_, RefusingServer::Start(options.users));
    guards.users = options.users;
    guards.foreign = [refusing = server->refusing_.get()](int fd) { refusing->Take(fd); };
  }
  guards.most_bytes_without_call = options.max_message_bytes + options.most_bytes_without_call;
  guards.slow_bytes_without_call = options.most_bytes_without_call;
  guards.calls = [guard = server->call_guard_.get()]() -> std::function<bool(const std::string&)> {
    return [guard, ended = guard->TakeEnded()](const std::string& connection) {
      return guard->HasCall(connection) || ended.count(connection) > 0;
    };
  };
  auto* to_grpc = server->to_grpc_.get();
  server->acceptor_ = std::make_unique<Acceptor>(
      std::move(listener),
      AcceptorLimits{options.max_connections, options.max_connections_per_peer, options.reserved_descriptors},
      [to_grpc](int fd) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
        connection.fd = fd;
        to_grpc->HandleNewConnection(&connection);
      },
      std::move(guards));
  server->call_guard_->SetAbort([acceptor = server->acceptor_.get()](const std::string& connection) {
    if (acceptor->Abort(connection))
      spdlog::warn("event=connection_ended reason=too_many_open_calls peer={}", connection);
  });
  return server;
}

Server::~Server() {
  if (acceptor_ != nullptr) Drain(absl::ZeroDuration());
}

void Server::SetServing(bool serving) {
  MutexLock lock(mu_);
  if (!drained_) server_->GetHealthCheckService()->SetServingStatus(serving);
}

// Once no call has been open for a moment, in which clients that look have closed their connections.
void Server::EndQuietConnections(const std::atomic<bool>& ended) {
  absl::Time last_call = MonotonicNow();
  while (!ended.load()) {
    if (call_guard_->open_calls() > 0) last_call = MonotonicNow();
    if (MonotonicNow() >= last_call + kQuiet) acceptor_->EndReading();
    absl::SleepFor(kLook);
  }
}

void Server::Drain(absl::Duration grace) {
  MutexLock lock(mu_);
  if (drained_) return;
  drained_ = true;
  server_->GetHealthCheckService()->SetServingStatus(false);
  acceptor_->Stop();
  if (refusing_ != nullptr) refusing_->Stop();
  std::atomic<bool> ended{false};
  std::thread ends_quiet([&] { EndQuietConnections(ended); });
  server_->Shutdown(DeadlineIn(grace));
  ended.store(true);
  ends_quiet.join();
  call_guard_->SetAbort(nullptr);
}

}  // namespace shardmesh
