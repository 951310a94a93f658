// shardmesh-node: keeps the workers of a host, and their memory (node.h).
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/base/seconds_flag.h"
#include "core/base/decimal_flags.h"
#include "core/base/status.h"
#include "core/job/job.h"
#include "local/process/runtime_folder.h"
#include "rpc/base/main_support.h"
#include "rpc/tls/tls_flags.h"
#include "worker/node/node.h"
#include "worker/relay/relay_server.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

constexpr char kFooter[] =
    R"(A worker that is killed is started again, and finds its memory. A node that is killed leaves its workers running;
started again with the same flags, it takes them over. SIGTERM stops the node and its workers.

Examples:
  shardmesh-node --coordinator 10.0.0.1:7000 --workers 8
  shardmesh-node --coordinator 10.0.0.1:7000 --workers 2 --name left --log-dir logs -- --threads 4
  shardmesh-node --coordinator 10.0.0.1:7000 --workers 8 --device cuda:0,cuda:1,cuda:2,cuda:3
)";

struct Flags {
  std::string coordinator = "127.0.0.1:7000";
  int workers = 1;
  std::string name, worker_binary, local_dir, socket, log_dir, address_dir, events, devices;
  std::string log_level = "info";
  double stop_grace = 10;
  std::vector<std::string> worker_args;
};

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--coordinator", flags.coordinator, "address of the coordinator")->capture_default_str();
  app.add_option("--workers", flags.workers, "how many")->required()->check(CLI::Range(1, kMaxRetainedWorkers));
  app.add_option("--name", flags.name, "workers are NAME-0, NAME-1, ...; unset: the host's name");
  app.add_option("--worker-binary", flags.worker_binary, "the worker; unset: shardmesh-worker beside this program");
  app.add_option("--local-dir", flags.local_dir, "folder of UNIX sockets; unset: /run/shardmesh-UID, or where this "
                 "user may not make that, $XDG_RUNTIME_DIR/shardmesh of a user that lingers, or /tmp/shardmesh-UID");
  app.add_option("--socket", flags.socket, "where workers reach the node; unset: LOCAL_DIR/node.sock");
  app.add_option("--log-dir", flags.log_dir, "a NAME.log for every worker; unset: their logs go to standard error");
  app.add_option("--address-dir", flags.address_dir,
                 "each worker writes its address to NAME in this folder once it has joined; unset: nowhere");
  app.add_option(
      "--events", flags.events,
      "append a line to this file for every worker that starts or ends: started NAME pid PID, ended NAME pid "
      "PID signal KILL; unset: none");
  app.add_option(
      "--device", flags.devices,
      "where the workers' steps run: cpu, or CUDA devices, which they take in turn, like cuda:0,cuda:1 (a job "
      "on them ends with its worker); unset: cpu");
  AddSeconds(app, "--stop-grace", flags.stop_grace, "from SIGTERM to SIGKILL of a worker, in seconds");
  app.add_option("--log-level", flags.log_level, "trace, debug, info, warn, error or off")->capture_default_str();
  app.add_option("WORKER_FLAGS", flags.worker_args, "after --: flags of every worker");
  app.footer(kFooter);
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

absl::StatusOr<NodeOptions> OptionsOf(const Flags& flags) {
  NodeOptions options;
  options.prefix = flags.name.empty() ? HostName() : flags.name;
  RETURN_IF_ERROR(ValidateId("--name", absl::StrCat(options.prefix, "-", flags.workers - 1)));
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  options.worker_binary =
      flags.worker_binary.empty() ? (self.parent_path() / "shardmesh-worker").string() : flags.worker_binary;
  // Absolute: trainers connect to sockets in it from other working directories.
  const std::string local_dir =
      fs::absolute(flags.local_dir.empty() ? RuntimeFolder() : flags.local_dir);
  options.socket = flags.socket.empty() ? local_dir + "/node.sock" : fs::absolute(flags.socket).string();
  options.num_workers = flags.workers;
  options.log_dir = flags.log_dir;
  if (!flags.address_dir.empty()) options.address_dir = fs::absolute(flags.address_dir).string();
  options.events_file = flags.events;
  options.devices = absl::StrSplit(flags.devices, ',', absl::SkipEmpty());  // a wrong one ends its worker, and says so
  options.worker_args = {"--coordinator", flags.coordinator, "--local-dir", local_dir};
  options.worker_args.insert(options.worker_args.end(), flags.worker_args.begin(), flags.worker_args.end());
  const bool one_path = absl::c_any_of(flags.worker_args, [](const std::string& flag) {
    return absl::StartsWith(flag, "unix:") || absl::StartsWith(flag, "--listen=unix:");
  });
  if (one_path && flags.workers > 1) {
    return absl::InvalidArgumentError(absl::StrCat("all ", flags.workers, " workers would listen on one UNIX socket; ",
                                                   "give them --listen 127.0.0.1:0, or start a node for each"));
  }
  options.stop_grace = absl::Seconds(flags.stop_grace);
  for (const auto& [flag, folder] : {std::pair("--log-dir", flags.log_dir), {"--address-dir", options.address_dir}}) {
    if (!folder.empty()) fs::create_directories(folder, error);
    if (!error) continue;
    return absl::PermissionDeniedError(
        absl::StrCat("cannot make the folder ", folder, ": ", error.message(), "; choose another ", flag));
  }
  return options;
}

// The files that the workers are given reach the coordinator for this process, too.
TlsOptions TlsOf(const std::vector<std::string>& worker_args) {
  CLI::App app;
  app.allow_extras();
  TlsOptions tls;
  AddTlsFlags(app, tls);
  try {
    app.parse(std::vector<std::string>(worker_args.rbegin(), worker_args.rend()));  // it takes them from the end
  } catch (const CLI::ParseError&) {
    // The workers say what is wrong.
  }
  return tls;
}

// Null, and a line of the log, where there can be none: workers call the coordinator themselves.
std::unique_ptr<RelayServer> StartRelay(const std::string& socket, const Flags& flags) {
  absl::StatusOr<std::unique_ptr<RelayServer>> relay =
      RelayServer::Start(socket, flags.coordinator, TlsOf(flags.worker_args));
  if (relay.ok()) return *std::move(relay);
  spdlog::warn("event=no_relay_of_heartbeats error={}", Quoted(relay.status().ToString()));
  return nullptr;
}

absl::Status RunNode(const Flags& flags) {
  StopSignal stop;
  RETURN_IF_ERROR(PrepareProcess({flags.log_level}));
  ASSIGN_OR_RETURN(NodeOptions options, OptionsOf(flags));
  std::unique_ptr<RelayServer> relay;
  const bool relays = absl::c_none_of(flags.worker_args,
                                      [](const std::string& flag) { return absl::StartsWith(flag, "--heartbeats"); });
  if (relays) {
    const std::string socket = options.socket + ".relay";
    options.worker_args.insert(options.worker_args.begin(), {"--heartbeats", absl::StrCat("unix:", socket)});
    // In a folder of which the node's own socket has made sure that no other user may write in it.
    options.listening = [&, socket] { relay = StartRelay(socket, flags); };
  }
  spdlog::info("event=node_starting pid={} workers={} name={} socket={}", getpid(), options.num_workers, options.prefix,
               options.socket);
  ASSIGN_OR_RETURN(const auto node, Node::Start(std::move(options), [&stop] { stop.Trigger(); }));
  while (!stop.WaitFor(absl::Seconds(3600))) {
  }
  spdlog::info("event=node_stopping");
  node->Stop();
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app{"shardmesh-node: starts the workers of a host, watches them, and holds their memory."};
  Flags flags;
  AddFlags(app, flags);
  DecimalNumbersOnly(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const absl::Status status = RunNode(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "shardmesh-node: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace shardmesh

int main(int argc, char** argv) { return shardmesh::Main(argc, argv); }
