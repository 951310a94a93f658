#include "client/cli/up/up_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/base/connection.h"
#include "client/cli/up/local_cluster.h"
#include "core/base/device_name.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "rpc/base/address.h"
#include "rpc/tls/tls_flags.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  ClusterOptions cluster;
  std::string bin_dir;
  std::string devices = "cpu";
  int workers = 0;  // 0: as many as the mesh has ranks
  double start_timeout_seconds = 30, grace_seconds = 10;
  bool json = false;
};

// One event as a line, at once.
void Print(const Flags& flags, const std::string& text, const Json& json) {
  std::fputs((flags.json ? JsonLine(json) : text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

ClusterEvents PrintingEvents(const Flags& flags) {
  ClusterEvents events;
  events.started = [&flags](const std::string& name, pid_t pid) {
    Print(flags, absl::StrCat("started ", name, " pid ", pid), {{"event", "started"}, {"name", name}, {"pid", pid}});
  };
  events.ended = [&flags](const std::string& name, pid_t pid, const std::string& how) {
    Print(flags, absl::StrCat("ended ", name, " pid ", pid, " ", how),
          {{"event", "ended"}, {"name", name}, {"pid", pid}, {"how", how}});
  };
  events.not_restarted = [&flags](const std::string& name, const absl::Status& error) {
    Print(flags, absl::StrCat("not restarted ", name, ": ", error.message()),
          {{"event", "not_restarted"}, {"name", name}, {"error", error.ToString()}});
  };
  return events;
}

// "cpu", or "cuda:0,cuda:1". InvalidArgument: something else; a job's workers are all on devices, or none is.
absl::StatusOr<std::vector<std::string>> ParseDevices(const std::string& text) {
  const std::vector<std::string> devices = absl::StrSplit(text, ',');
  for (const std::string& device : devices) {
    if (CudaDeviceOf(device).has_value() || text == "cpu") continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--device is \"", text, "\"; it is cpu, or CUDA devices like cuda:0,cuda:1"));
  }
  return devices;
}

// InvalidArgument: other hosts are to reach the service, and nobody says at which address; or they cannot reach what it
// says.
absl::Status CheckAdvertise(const ClusterOptions& cluster) {
  ASSIGN_OR_RETURN(const Address listen, ParseAddress(cluster.listen));
  if (cluster.advertise.empty()) return CheckDialable(listen);
  if (!listen.is_local()) return CheckHost("--advertise", cluster.advertise);
  return absl::InvalidArgumentError(absl::StrCat("--advertise is ", cluster.advertise, " and --listen ", cluster.listen,
                                                 ", which no other host reaches; give --listen 0.0.0.0:7000, or leave "
                                                 "out --advertise"));
}

// Fits workers and mesh to each other. InvalidArgument: the mesh is none, or has more ranks than there are workers; or
// as ParseDevices.
absl::Status Complete(Flags& flags) {
  ClusterOptions& cluster = flags.cluster;
  RETURN_IF_ERROR(CheckTlsComplete(cluster.tls));
  RETURN_IF_ERROR(CheckAdvertise(cluster));
  ASSIGN_OR_RETURN(cluster.devices, ParseDevices(flags.devices));
  if (cluster.mesh.empty()) {
    cluster.num_workers = flags.workers == 0 ? 1 : flags.workers;
    cluster.mesh = absl::StrCat("fsdp=", cluster.num_workers);
    return absl::OkStatus();
  }
  const absl::StatusOr<MeshSpec> mesh = ParseMeshSpec(cluster.mesh);
  RETURN_IF_ERROR(Annotate(mesh.status(), "--mesh"));
  const int64_t ranks = mesh->NumRanks();
  if (flags.workers == 0 && ranks > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("--mesh ", cluster.mesh, " has ", ranks, " ranks; one machine starts at most 1024 workers"));
  }
  cluster.num_workers = flags.workers == 0 ? static_cast<int>(ranks) : flags.workers;
  if (ranks <= cluster.num_workers) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--mesh ", cluster.mesh, " has ", ranks, " ranks, --workers is ",
                                                 cluster.num_workers, "; a job needs a worker for each rank"));
}

absl::Status PrepareFiles(Flags& flags) {
  ASSIGN_OR_RETURN(flags.cluster.coordinator_binary, FindProgram("shardmesh-coordinator", "server", flags.bin_dir));
  ASSIGN_OR_RETURN(flags.cluster.worker_binary, FindProgram("shardmesh-worker", "worker", flags.bin_dir));
  if (flags.cluster.keep) {
    ASSIGN_OR_RETURN(flags.cluster.node_binary, FindProgram("shardmesh-node", "worker", flags.bin_dir));
  }
  if (flags.cluster.log_dir.empty()) return absl::OkStatus();
  std::error_code error;
  std::filesystem::create_directories(flags.cluster.log_dir, error);
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot make --log-dir ", flags.cluster.log_dir, ": ", error.message()));
}

absl::Status Up(Flags& flags) {
  StopSignal stop;
  RETURN_IF_ERROR(PrepareFiles(flags));
  std::signal(SIGPIPE, SIG_IGN);  // whoever reads the lines may go away; the service stays
  ASSIGN_OR_RETURN(const std::unique_ptr<LocalCluster> cluster,
                   LocalCluster::Start(flags.cluster, PrintingEvents(flags), stop));
  const ClusterOptions& options = flags.cluster;
  Print(flags, absl::StrCat("ready ", cluster->address(), " workers ", options.num_workers, " mesh ", options.mesh),
        {{"event", "ready"},
         {"coordinator", cluster->address()},
         {"workers", options.num_workers},
         {"mesh", options.mesh}});
  return cluster->Supervise(stop);
}

void RunUp(Flags flags, CommandResult& result) {
  if (const absl::Status usage = Complete(flags); !usage.ok()) return FailUsage(usage.message(), result);
  flags.cluster.start_timeout = absl::Seconds(flags.start_timeout_seconds);
  flags.cluster.stop_grace = absl::Seconds(flags.grace_seconds);
  const absl::Status status = Up(flags);
  if (!status.ok() && !absl::IsCancelled(status)) Fail(status, result);
}

void AddOptions(CLI::App& command, Flags& flags) {
  ClusterOptions& cluster = flags.cluster;
  command.add_option("--workers", flags.workers, "Number of workers; unset: the mesh's ranks, or 1")
      ->check(CLI::Range(1, 1024));
  command.add_option("--mesh", cluster.mesh,
                     "Mesh of jobs that name none, like ddp=2,fsdp=2; not kept in --state; unset: fsdp=WORKERS");
  command
      .add_option("--listen", cluster.listen,
                  "Address of the coordinator, and the host of the workers' addresses; port 0 has one chosen. Off this "
                  "machine with TLS alone")
      ->capture_default_str();
  command.add_option("--advertise", cluster.advertise,
                     "Name or IP address of this machine that other hosts dial, and the certificates have; unset: the "
                     "host of --listen");
  command.add_option("--state", cluster.state, "File that keeps jobs, or :memory:")->capture_default_str();
  command.add_option("--threads", cluster.threads, "Threads of a worker's step")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command
      .add_option("--device", flags.devices,
                  "Where the workers' steps run: cpu, or CUDA devices, which they take in turn, like cuda:0,cuda:1")
      ->capture_default_str();
  command
      .add_option("--checkpoint-root", cluster.checkpoint_roots,
                  "Folder below which workers save and load checkpoints; may be given several times. Unset: any")
      ->allow_extra_args(false);
  command.add_option("--log-dir", cluster.log_dir, "Folder for a NAME.log of each process; unset: standard error");
  command.add_option("--log-level", cluster.log_level, "Of each process: trace, debug, info, warn, error or off")
      ->capture_default_str();
  command.add_option("--bin-dir", flags.bin_dir,
                     "Folder of shardmesh-coordinator, shardmesh-node and shardmesh-worker");
  command.add_option("--heartbeat-interval-ms", cluster.heartbeat_interval_ms, "How often workers report")
      ->check(CLI::Range(10, 60'000))
      ->capture_default_str();
  command.add_option("--heartbeat-timeout-ms", cluster.heartbeat_timeout_ms, "Silence after which a worker is dead")
      ->check(CLI::Range(100, 600'000))
      ->capture_default_str();
  AddSeconds(command, "--start-timeout", flags.start_timeout_seconds, "Seconds until every worker must have joined");
  AddSeconds(command, "--grace", flags.grace_seconds, "Seconds from SIGTERM to SIGKILL, at the end");
  command.add_flag(
      "--keep,!--no-keep", cluster.keep,
      "A shardmesh-node keeps the workers: one that is killed comes back, with its jobs. With --no-keep it "
      "stays away, and its jobs have failed");
  command.add_flag(
      "--restart", cluster.restart,
      "Start coordinator and node (with --no-keep: workers) again when they end by themselves: at once after "
      "a long run, after up to 5 s if they keep ending; a coordinator only with a --state file");
  command.add_flag("--json", flags.json, "Print each event as one line of JSON");
  AddTlsFlags(command, cluster.tls);
}

}  // namespace

absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& folder,
                                        const std::string& bin_dir) {
  namespace fs = std::filesystem;
  std::vector<fs::path> places;
  if (!bin_dir.empty()) {
    places = {fs::path(bin_dir) / name, fs::path(bin_dir) / folder / name};
  } else {
    std::error_code error;
    const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
    if (!error) places = {here / name, here.parent_path().parent_path() / folder / name};
    const char* path = std::getenv("PATH");
    for (const absl::string_view part : absl::StrSplit(path == nullptr ? "" : path, ':', absl::SkipEmpty())) {
      places.push_back(fs::path(std::string(part)) / name);
    }
  }
  for (const fs::path& place : places) {
    std::error_code error;
    if (fs::is_regular_file(place, error) && access(place.c_str(), X_OK) == 0) return place.string();
  }
  return absl::NotFoundError(absl::StrCat("no program ", name, bin_dir.empty() ? " beside shardctl or on PATH" : " in ",
                                          bin_dir, "; name its folder with --bin-dir"));
}

void AddUpCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("up", "Run a coordinator and workers on this machine until it is stopped");
  const auto flags = std::make_shared<Flags>();
  AddOptions(*command, *flags);
  command->footer(
      "Prints a line for each process that starts and ends, and \"ready ADDRESS ...\" once every worker has joined.\n"
      "SIGINT or SIGTERM end all of them, exit code 0. If shardctl is killed they end with it.\n"
      "A worker that is killed is started again, and its jobs go on after a pause of about 0.1 s; those on CUDA\n"
      "devices have failed: delete and create them again. Coordinator and node are started again with --restart\n"
      "only: the others go on without them. Exit code 1 once no process is left.\n"
      "Examples:\n"
      "  shardctl up --workers 4 --mesh ddp=2,fsdp=2\n"
      "  shardctl up --workers 2 --listen 127.0.0.1:0 --log-dir logs --json\n"
      "  shardctl up --mesh fsdp=8 --state ./shardmesh.db --threads 2\n"
      "  shardctl up --workers 4 --state ./shardmesh.db --restart\n"
      "  shardctl up --workers 4 --no-keep\n"
      "  shardctl up --workers 2 --device cuda:0\n"
      "  shardctl up --workers 4 --listen 0.0.0.0:7000 --advertise 10.0.0.1 \\\n"
      "      --tls-cert server.pem --tls-key server.key --tls-ca ca.pem");
  command->callback([flags, &result] { RunUp(*flags, result); });
}

}  // namespace shardmesh
