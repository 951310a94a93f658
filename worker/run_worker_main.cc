#include "worker/run_worker_main.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/cli/base/seconds_flag.h"
#include "client/cpp/transport/coordinator_transport.h"
#include "core/base/clock.h"
#include "core/base/decimal_flags.h"
#include "core/base/device_name.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"
#include "local/process/host_id.h"
#include "local/process/runtime_folder.h"
#include "local/socket/socket.h"
#include "rpc/base/address.h"
#include "rpc/base/main_support.h"
#include "rpc/server.h"
#include "rpc/tls/tls_flags.h"
#include "worker/doors/local_server.h"
#include "worker/doors/shard_service.h"
#include "worker/memory/host_capacity.h"
#include "worker/node/node_link.h"
#include "worker/pass/device/device_pass.h"
#include "worker/process/membership_agent.h"
#include "worker/process/peer_links.h"
#include "worker/process/worker.h"
#include "worker/relay/relayed_coordinator.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kTakeOver = absl::Seconds(10);
constexpr absl::Duration kLook = absl::Seconds(1);  // at the stop signal
constexpr char kSocketSuffix[] = ".sock";

struct Flags {
  std::string coordinator = "127.0.0.1:7000";
  std::string listen = "127.0.0.1:0";
  std::string advertise;
  std::string name;
  std::string host_name, heartbeats;
  std::string group_address;
  std::string local_dir;
  std::string address_file;
  std::string node;
  std::string device = "cpu";
  std::string log_level = "info";
  int threads = 1;
  int max_connections = 1024;
  double step_timeout = 60;
  double spin = 0;
  double join_timeout = 60;
  std::vector<std::string> checkpoint_roots;
  TlsOptions tls;
  bool insecure_transport = false;
};

// How steps run.
void AddStepFlags(CLI::App& app, Flags& flags) {
  app.add_option("--threads", flags.threads, "threads of a step")->capture_default_str()->check(CLI::Range(1, 1024));
  app.add_option("--device", flags.device,
                 "where steps run and windows lie: cpu, or cuda:N (as the CUDA driver counts). A worker whose device "
                 "cannot be used does not start")
      ->capture_default_str();
  AddSeconds(app, "--step-timeout", flags.step_timeout, "seconds that members may take for one step");
  app.add_option("--spin", flags.spin,
                 "seconds that a step's waits poll before they sleep; only for a worker with a core to itself")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
}

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--coordinator", flags.coordinator, "address of the coordinator")->capture_default_str();
  app.add_option("--listen", flags.listen, "address to serve trainers and readers at; port 0 has one chosen")
      ->capture_default_str();
  app.add_option("--advertise", flags.advertise,
                 "name or IP address that others dial, with the port of --listen; needed where that is 0.0.0.0. Unset: "
                 "the host of --listen");
  app.add_option("--name", flags.name, "unique name of this worker; unset: HOST-PID");
  app.add_option("--local-dir", flags.local_dir, "folder of the UNIX socket; unset: as shardmesh-node's");
  app.add_option("--node,--keeper", flags.node,
                 "socket of this host's node (shardmesh-node, which sets it): should this worker be killed, its next "
                 "incarnation goes on with its jobs. Unset: they end with it");
  app.add_option("--group-address", flags.group_address,
                 "this host's address for workers of other hosts: one job may then be on several. Beyond this machine "
                 "it needs TLS, with which what they send is encrypted and each proves who it is. Unset: one host");
  app.add_flag("--insecure-transport", flags.insecure_transport,
               "with --group-address: what hosts send each other goes through Gloo, neither encrypted nor "
               "authenticated, and a wrong byte may end the process: a network that nobody else reaches");
  app.add_option("--host-name", flags.host_name,
                 "workers of one host with other names count as on other hosts, and share no memory");
  app.add_option("--heartbeats", flags.heartbeats,
                 "where heartbeats go first, to reach the coordinator with those of this host's other workers "
                 "(shardmesh-node sets it). Unset, or if nothing answers there: to the coordinator itself");
  AddStepFlags(app, flags);
  app.add_option("--checkpoint-root", flags.checkpoint_roots,
                 "folder below which checkpoints are saved and loaded; may be given several times. Unset: the folders "
                 "of SHARDMESH_CHECKPOINT_ROOT, with : between them; without that any folder that the caller proves "
                 "to reach")
      ->allow_extra_args(false);
  AddSeconds(app, "--join-timeout", flags.join_timeout, "seconds to wait for the coordinator at the start");
  app.add_option("--max-connections", flags.max_connections, "open connections at once")->capture_default_str();
  AddTlsFlags(app, flags.tls);
  app.add_option("--address-file", flags.address_file, "write the address served to this file, once joined");
  app.add_option("--log-level", flags.log_level, "trace, debug, info, warn, error or off")->capture_default_str();
  app.set_version_flag("--version", "shardmesh-worker 0.1.0");
  app.footer(
      "Examples:\n"
      "  shardmesh-worker --coordinator 127.0.0.1:7000\n"
      "  shardmesh-worker --coordinator 10.0.0.1:7000 --listen 10.0.0.2:7001 \\\n"
      "      --tls-cert worker.pem --tls-key worker.key --tls-ca ca.pem");
}

std::string DefaultName() {
  char host[65] = "worker";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat(host, "-", getpid());
}

absl::Status WriteAddress(const std::string& path, const std::string& address) {
  if (path.empty()) return absl::OkStatus();
  const std::string part = path + ".part";
  {
    std::ofstream file(part);
    file << address << "\n";
    if (!file.good()) return absl::PermissionDeniedError(absl::StrCat("cannot write ", part));
  }
  if (rename(part.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
}

// The newest incarnation of this name among the dead sockets, "NAME-INCARNATION.sock"; 0: there is none. Others are of
// workers whose names begin with this one.
int64_t NewestDeadIncarnation(const std::string& name, const std::vector<std::string>& sockets) {
  uint64_t newest = 0;
  for (absl::string_view socket : sockets) {
    uint64_t incarnation = 0;
    if (!absl::ConsumePrefix(&socket, name) || !absl::ConsumePrefix(&socket, "-") ||
        !absl::ConsumeSuffix(&socket, kSocketSuffix) || !absl::SimpleHexAtoi(socket, &incarnation)) {
      continue;
    }
    newest = std::max(newest, incarnation);
  }
  return static_cast<int64_t>(std::min<uint64_t>(newest, std::numeric_limits<int64_t>::max()));
}

// A worker that was killed and started again meets its own old incarnation, which counts as alive for one heartbeat
// time-out, unless it found that one dead on this host: the name is asked for again for a while before it is said to be
// taken. One that `resumed` jobs, which go on without a coordinator, asks until it has joined or is told to stop.
absl::Status AwaitJoined(MembershipAgent& agent, StopSignal& stop, absl::Duration timeout, bool resumed) {
  while (resumed && !agent.AwaitJoined(kLook).ok() && !stop.WaitFor(absl::Milliseconds(200))) {
  }
  if (resumed) return absl::OkStatus();
  const absl::Time taken_until = MonotonicNow() + std::min(timeout, kTakeOver);
  absl::Status joined = agent.AwaitJoined(timeout);
  while (absl::IsAlreadyExists(joined) && MonotonicNow() < taken_until && !stop.WaitFor(absl::Milliseconds(200))) {
    joined = agent.AwaitJoined(timeout);
  }
  return Annotate(joined, "joining");
}

// The node's side of this incarnation; null: none was named. It takes over from the last one, at the same socket.
absl::StatusOr<std::unique_ptr<NodeLink>> TakeOver(const Flags& flags, v1::JoinRequest& identity) {
  std::unique_ptr<NodeLink> node;
  if (flags.node.empty()) return node;
  ASSIGN_OR_RETURN(node, NodeLink::Connect(flags.node, identity.name(), identity.incarnation(), nullptr));
  identity.set_incarnation(node->incarnation());
  identity.set_retained(true);
  const NodeLink::Left& left = node->left();
  if (left.incarnation == 0) return node;
  identity.set_resumes(left.incarnation);
  if (!left.local_socket.empty()) identity.set_local_socket(left.local_socket);
  return node;
}

// Where the last incarnation was reached, if it left jobs; where the flags say, if that place is taken: then the
// coordinator ends them.
absl::StatusOr<std::unique_ptr<Server>> StartServer(ServerOptions options, ShardService& service,
                                                    const NodeLink* node) {
  if (node != nullptr && !node->left().jobs.empty() && !node->left().address.empty()) {
    ServerOptions again = options;
    again.listen = node->left().address;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(again, {&service});
    if (server.ok()) return server;
    spdlog::error("event=address_taken address={} error=\"{}\"", again.listen, server.status().ToString());
  }
  return Server::Start(options, {&service});
}

absl::StatusOr<std::optional<WorkerDevice>> OpenDevice(const std::string& text, const WorkerCuda& cuda) {
  if (text == "cpu") return std::optional<WorkerDevice>();
  const std::optional<int> number = CudaDeviceOf(text);
  if (!number.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("--device is \"", text, "\"; it is cpu or cuda:N, as cuda:0"));
  }
  absl::StatusOr<WorkerDevice> device = WorkerDevice::Open(*number, cuda.kernels, cuda.library);
  if (!device.ok()) return Annotate(device.status(), absl::StrCat("--device ", text, " cannot be used"));
  return std::make_optional(*std::move(device));
}

// Those that the environment names reach the workers of a service that a trainer starts for itself.
absl::StatusOr<FolderAccess> CheckpointFolders(const Flags& flags) {
  std::vector<std::string> roots = flags.checkpoint_roots;
  const char* const named = std::getenv("SHARDMESH_CHECKPOINT_ROOT");
  const bool by_flag = !roots.empty();
  if (!by_flag && named != nullptr) roots = absl::StrSplit(named, ':', absl::SkipEmpty());
  absl::StatusOr<FolderAccess> access = FolderAccess::Create(roots);
  if (!access.ok()) return Annotate(access.status(), by_flag ? "--checkpoint-root" : "SHARDMESH_CHECKPOINT_ROOT");
  return access;
}

// Absolute: trainers connect to the socket from other working directories.
std::string LocalFolder(const Flags& flags) {
  return std::filesystem::absolute(flags.local_dir.empty() ? RuntimeFolder() : flags.local_dir);
}

// Removes the sockets of this name's dead incarnations, of which it returns the newest; 0: there is none.
int64_t RemoveDeadIncarnations(const Flags& flags, const std::string& name) {
  return NewestDeadIncarnation(name, RemoveDeadSockets(LocalFolder(flags), name + "-"));
}

// Who this incarnation is, before it serves: its name, host, number, and the path of its local socket. `node`: as
// TakeOver makes it.
absl::StatusOr<v1::JoinRequest> Identify(const Flags& flags, const std::string& host_id,
                                         std::unique_ptr<NodeLink>& node) {
  v1::JoinRequest identity;
  identity.set_name(flags.name.empty() ? DefaultName() : flags.name);
  RETURN_IF_ERROR(ValidateId("--name", identity.name()));
  if (!flags.host_name.empty()) RETURN_IF_ERROR(ValidateId("--host-name", flags.host_name));
  identity.set_host_id(flags.host_name.empty() ? host_id : absl::StrCat(host_id, "/", flags.host_name));
  identity.set_pid(getpid());
  // With a node the sockets of dead incarnations stay until it has said what they left.
  const int64_t dead = flags.node.empty() ? RemoveDeadIncarnations(flags, identity.name()) : 0;
  identity.set_incarnation(NextIncarnation(absl::Now(), dead));
  ASSIGN_OR_RETURN(node, TakeOver(flags, identity));
  identity.set_dead_incarnation(node == nullptr ? dead : 0);
  if (identity.local_socket().empty()) {
    // Not the process id: it repeats in containers that share the folder.
    identity.set_local_socket(absl::StrCat(LocalFolder(flags), "/", identity.name(), "-",
                                           absl::Hex(identity.incarnation()), kSocketSuffix));
  }
  return identity;
}

// How it reaches other workers: the lead of its job, and whoever has weights of an older epoch.
void AddPeerCalls(const TlsOptions& tls, WorkerOptions& options) {
  const auto links = std::make_shared<PeerLinks>(tls);
  options.meet = [links](const v1::Peer& lead, const v1::MeetRequest& request, absl::Duration timeout) {
    return links->Meet(lead, request, timeout);
  };
  options.transfer = [links](const v1::Peer& from, const v1::TransferRequest& request, const TransferSink& sink,
                             absl::Duration timeout) { return links->Transfer(from, request, sink, timeout); };
  options.copy = [links](const v1::Peer& to, const v1::CopyRequest& request, const ReportProgress& told,
                         absl::Duration timeout) { return links->Copy(to, request, told, timeout); };
  options.peers_named = [links](const std::set<std::string>& addresses) { links->DropAllBut(addresses); };
}

// InvalidArgument: bytes between hosts would cross a network in the clear, and nobody said that they may.
absl::Status CheckTransport(const Flags& flags) {
  Address address;
  address.host = flags.group_address;
  if (flags.group_address.empty() || address.is_local() || flags.tls.enabled() || flags.insecure_transport) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--group-address ", flags.group_address, " is not on this machine alone, so TLS is needed between hosts: ",
      HowToGiveTls(flags.tls), ", or --insecure-transport on a network that nobody else reaches"));
}

absl::StatusOr<WorkerOptions> OptionsOf(const Flags& flags, const WorkerCuda& cuda, const std::string& name,
                                        NodeLink* node) {
  WorkerOptions options;
  options.name = name;
  options.threads = flags.threads;
  options.step_timeout = absl::Seconds(flags.step_timeout);
  options.spin = absl::Seconds(flags.spin);
  options.host_capacity = ReadHostCapacity();
  RETURN_IF_ERROR(CheckTransport(flags));
  options.group_address = flags.group_address;
  options.transport = {flags.tls, flags.insecure_transport};
  if (flags.insecure_transport) {
    spdlog::warn("event=insecure_transport worker={} remedy=\"leave --insecure-transport out, and give TLS\"", name);
  }
  options.node = node;
  ASSIGN_OR_RETURN(options.device, OpenDevice(flags.device, cuda));
  AddPeerCalls(flags.tls, options);
  ASSIGN_OR_RETURN(options.checkpoint_folders, CheckpointFolders(flags));
  return options;
}

// Until the stop signal: tells the service and the node which incarnation the coordinator has let in.
void FollowMembership(const MembershipAgent& agent, ShardService& service, NodeLink* node, StopSignal& stop) {
  MembershipAgent::Joined told;
  do {
    if (agent.joined() != told) {
      told = agent.joined();
      service.SetIncarnation(told.incarnation);
      // It is told when it is back.
      if (node != nullptr) node->Joined(told.incarnation, told.heartbeat_timeout).IgnoreError();
    }
  } while (!stop.WaitFor(kLook));
}

// From joining to the stop signal; then it takes no more calls, and is no member any more.
absl::Status ServeUntilStopped(const Flags& flags, CoordinatorTransport& coordinator, Worker& worker,
                               const v1::JoinRequest& identity, ShardService& service, Server& server, NodeLink* node,
                               StopSignal& stop) {
  MembershipAgent agent(coordinator, worker, identity);
  absl::Status end = AwaitJoined(agent, stop, absl::Seconds(flags.join_timeout), identity.resumed_size() > 0);
  if (end.ok()) end = WriteAddress(flags.address_file, identity.address());
  if (end.ok()) {
    spdlog::info("event=serving worker={} address={} local_socket={} device=\"{}\"", identity.name(),
                 identity.address(), identity.local_socket(), worker.DeviceText());
    FollowMembership(agent, service, node, stop);
    spdlog::info("event=draining worker={}", identity.name());
  }
  server.SetServing(false);
  agent.Stop();
  return end;
}

absl::StatusOr<std::unique_ptr<CoordinatorTransport>> ReachCoordinator(const Flags& flags, Worker& worker) {
  ASSIGN_OR_RETURN(auto coordinator, NewGrpcCoordinatorTransport(flags.coordinator, flags.tls));
  if (flags.heartbeats.empty()) return coordinator;
  absl::StatusOr<std::unique_ptr<CoordinatorTransport>> relay =
      NewGrpcCoordinatorTransport(flags.heartbeats, flags.tls);
  if (!relay.ok()) return Annotate(relay.status(), "--heartbeats");
  return std::unique_ptr<CoordinatorTransport>(std::make_unique<RelayedCoordinator>(
      worker.options().name, std::move(coordinator), *std::move(relay), [&worker] { worker.Hurry(); }));
}

absl::Status RunWorker(const Flags& flags, const WorkerCuda& cuda) {
  StopSignal stop;
  RETURN_IF_ERROR(PrepareProcess({flags.log_level, true, kMinThreads + flags.threads}));
  RealClock clock;
  ASSIGN_OR_RETURN(const std::string host_id, HostId());
  std::unique_ptr<NodeLink> node;
  ASSIGN_OR_RETURN(v1::JoinRequest identity, Identify(flags, host_id, node));
  ASSIGN_OR_RETURN(const WorkerOptions options, OptionsOf(flags, cuda, identity.name(), node.get()));
  Worker worker(options, NewProcessMemory());
  ASSIGN_OR_RETURN(const auto coordinator, ReachCoordinator(flags, worker));
  if (node != nullptr) identity.set_dead_incarnation(RemoveDeadIncarnations(flags, identity.name()));
  for (v1::ResumedJob& job : worker.Resume()) *identity.add_resumed() = std::move(job);
  ASSIGN_OR_RETURN(auto local, LocalServer::Start(identity.local_socket(), worker, clock));
  ShardService service(worker, *local, host_id, identity.incarnation());
  ServerOptions server_options;
  server_options.listen = flags.listen;
  server_options.tls = flags.tls;
  server_options.max_connections = flags.max_connections;
  ASSIGN_OR_RETURN(auto server, StartServer(server_options, service, node.get()));
  ASSIGN_OR_RETURN(const std::string advertised, AdvertisedAddress(server->address(), flags.advertise));
  identity.set_address(advertised);
  if (node != nullptr) node->Serve(server->address(), local->path()).IgnoreError();  // it is told when it is back
  identity.set_spans_hosts(!options.group_address.empty());
  identity.set_has_device(options.device.has_value());
  const absl::Status end =
      ServeUntilStopped(flags, *coordinator, worker, identity, service, *server, node.get(), stop);
  worker.Leave();
  server->Drain(absl::Seconds(5));
  return end;
}

}  // namespace

int RunWorkerMain(int argc, char** argv, const WorkerCuda& cuda) {
  CLI::App app{"shardmesh-worker: holds one shard of every job that the coordinator assigns to it."};
  Flags flags;
  AddFlags(app, flags);
  DecimalNumbersOnly(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const absl::Status status = RunWorker(flags, cuda);
  if (status.ok()) return 0;
  std::fprintf(stderr, "shardmesh-worker: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace shardmesh
