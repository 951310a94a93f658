#include "client/cli/up/local_cluster.h"

#include <poll.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "rpc/base/address.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kPollStart = absl::Milliseconds(10);
constexpr absl::Duration kPollEnds = absl::Milliseconds(50);

constexpr absl::Duration kNodeEnds = absl::Seconds(15);  // after the grace, in which its workers end

constexpr char kNode[] = "node";
constexpr char kMemoryState[] = ":memory:";
constexpr size_t kMaxFolderBytes = 64;  // the path of a UNIX socket has at most 107 bytes

// For address files, and the workers' sockets: two services may have equal names and, in namespaces of their own, equal
// pids.
absl::StatusOr<std::unique_ptr<OwnedFolder>> MakeFolder() {
  std::error_code error;
  const std::string base = std::filesystem::temp_directory_path(error).string();
  return OwnedFolder::Create(error || base.size() > kMaxFolderBytes ? "/tmp" : base, "shardctl-up");
}

void AddTlsArguments(const TlsOptions& tls, std::vector<std::string>& args) {
  if (!tls.cert_file.empty()) args.insert(args.end(), {"--tls-cert", tls.cert_file});
  if (!tls.key_file.empty()) args.insert(args.end(), {"--tls-key", tls.key_file});
  if (!tls.ca_file.empty()) args.insert(args.end(), {"--tls-ca", tls.ca_file});
}

// Those of a worker, which listens where the coordinator does, at a port that is chosen.
void AddWorkerArguments(const ClusterOptions& options, std::vector<std::string>& args) {
  const absl::StatusOr<Address> listen = ParseAddress(options.listen);
  if (listen.ok() && !listen->is_local()) {
    args.insert(args.end(), {"--listen", Address{"", listen->host, 0}.ToString()});
    if (!options.advertise.empty()) args.insert(args.end(), {"--advertise", options.advertise});
  }
  for (const std::string& root : options.checkpoint_roots) args.insert(args.end(), {"--checkpoint-root", root});
  AddTlsArguments(options.tls, args);
  if (!options.tls.override_target_name.empty()) {
    args.insert(args.end(), {"--tls-name", options.tls.override_target_name});
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::Start(ClusterOptions options, ClusterEvents events,
                                                                  StopSignal& stop) {
  ASSIGN_OR_RETURN(std::unique_ptr<OwnedFolder> folder, MakeFolder());
  std::unique_ptr<LocalCluster> cluster(new LocalCluster(std::move(options), std::move(events), std::move(folder)));
  RETURN_IF_ERROR(cluster->StartAll(stop));
  return cluster;
}

LocalCluster::LocalCluster(ClusterOptions options, ClusterEvents events, std::unique_ptr<OwnedFolder> folder)
    : options_(std::move(options)), events_(std::move(events)), folder_(std::move(folder)) {}

LocalCluster::~LocalCluster() { Stop(); }

// Every process writes its address into a file once it serves; a worker's says that it has joined as well.
absl::Status LocalCluster::StartAll(StopSignal& stop) {
  const absl::Time deadline = MonotonicNow() + options_.start_timeout;
  RETURN_IF_ERROR(StartCoordinator());
  ASSIGN_OR_RETURN(address_, AwaitAddress("coordinator", deadline, stop));
  children_.front().options.args[1] = address_;  // of later incarnations, too: the workers know it
  ASSIGN_OR_RETURN(address_, AdvertisedAddress(address_, options_.advertise));
  RETURN_IF_ERROR(options_.keep ? StartNode() : StartWorkers());
  for (int i = 0; i < options_.num_workers; ++i) {
    RETURN_IF_ERROR(AwaitAddress(absl::StrCat("worker-", i), deadline, stop));
  }
  return absl::OkStatus();
}

absl::Status LocalCluster::StartCoordinator() {
  std::vector<std::string> args = {"--listen",     options_.listen, "--state",
                                   options_.state, "--log-level",   options_.log_level};
  args.insert(args.end(), {"--heartbeat-interval-ms", absl::StrCat(options_.heartbeat_interval_ms),
                           "--heartbeat-timeout-ms", absl::StrCat(options_.heartbeat_timeout_ms)});
  args.insert(args.end(), {"--address-file", folder_->path() + "/coordinator"});
  if (!options_.mesh.empty()) args.insert(args.end(), {"--default-mesh", options_.mesh});
  AddTlsArguments(options_.tls, args);
  return StartChild("coordinator", options_.coordinator_binary, std::move(args));
}

absl::Status LocalCluster::StartWorkers() {
  const std::string& folder = folder_->path();
  for (int i = 0; i < options_.num_workers; ++i) {
    const std::string name = absl::StrCat("worker-", i);
    std::vector<std::string> args = {"--coordinator", address_, "--name", name};
    args.insert(args.end(), {"--threads", absl::StrCat(options_.threads), "--log-level", options_.log_level});
    args.insert(args.end(), {"--address-file", absl::StrCat(folder, "/", name), "--local-dir", folder});
    args.insert(args.end(), {"--device", options_.devices[i % options_.devices.size()]});
    AddWorkerArguments(options_, args);
    RETURN_IF_ERROR(StartChild(name, options_.worker_binary, std::move(args)));
  }
  return absl::OkStatus();
}

absl::Status LocalCluster::StartNode() {
  const std::string& folder = folder_->path();
  std::vector<std::string> args = {"--coordinator", address_, "--workers", absl::StrCat(options_.num_workers)};
  args.insert(args.end(), {"--name", "worker", "--worker-binary", options_.worker_binary, "--local-dir", folder});
  args.insert(args.end(), {"--address-dir", folder, "--events", folder + "/events"});
  args.insert(args.end(), {"--device", absl::StrJoin(options_.devices, ","), "--log-level", options_.log_level});
  args.insert(args.end(), {"--stop-grace", absl::StrCat(absl::ToDoubleSeconds(options_.stop_grace))});
  if (!options_.log_dir.empty()) args.insert(args.end(), {"--log-dir", options_.log_dir});
  args.insert(args.end(), {"--", "--threads", absl::StrCat(options_.threads), "--log-level", options_.log_level});
  AddWorkerArguments(options_, args);
  workers_.emplace(folder + "/events", events_);
  return StartChild(kNode, options_.node_binary, std::move(args));
}

absl::Status LocalCluster::StartChild(const std::string& name, const std::string& program,
                                      std::vector<std::string> args) {
  Child child;
  child.options = {name, program, std::move(args), LogFile(name)};
  if (name == kNode) child.options.when_parent_ends = SIGTERM;  // killed, it would leave its workers
  ASSIGN_OR_RETURN(child.process, ChildProcess::Start(child.options));
  child.started = MonotonicNow();
  children_.push_back(std::move(child));
  events_.started(name, children_.back().process->pid());
  return absl::OkStatus();
}

absl::StatusOr<std::string> LocalCluster::AwaitAddress(const std::string& name, absl::Time deadline, StopSignal& stop) {
  const std::string file = absl::StrCat(folder_->path(), "/", name);
  const auto started = [&] { return !workers_.has_value() || workers_->HasStarted(name); };
  std::string address;
  while (!std::getline(std::ifstream(file), address) || address.empty() || !started()) {
    if (workers_.has_value()) workers_->Read();
    RETURN_IF_ERROR(CheckNoneEnded());
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(name, " was not ready within ", absl::FormatDuration(options_.start_timeout)));
    }
    if (stop.WaitFor(kPollStart)) return absl::CancelledError("stopped before every worker was ready");
  }
  return address;
}

absl::Status LocalCluster::CheckNoneEnded() const {
  const auto ended = [&](const std::string& name, pid_t pid, const std::string& how) {
    const std::string log = LogFile(name);
    return absl::UnavailableError(absl::StrCat(name, " (pid ", pid, ") ended with ", how,
                                               " before it was ready; its log: ", log.empty() ? "above" : log));
  };
  for (const Child& child : children_) {
    const std::optional<int> status = child.process->Ended();
    if (status.has_value()) return ended(child.options.name, child.process->pid(), EndText(*status));
  }
  if (!workers_.has_value() || !workers_->first_end().has_value()) return absl::OkStatus();
  return ended(workers_->first_end()->name, workers_->first_end()->pid, workers_->first_end()->how);
}

std::string LocalCluster::LogFile(const std::string& name) const {
  return options_.log_dir.empty() ? "" : absl::StrCat(options_.log_dir, "/", name, ".log");
}

size_t LocalCluster::ReportEnds() {
  size_t running = 0;
  if (workers_.has_value()) {
    const bool node_ended = children_.back().process->Ended().has_value();
    workers_->Read();
    if (node_ended) workers_->ReportUntold();
    if (workers_->AnyRuns()) ++running;
  }
  for (Child& child : children_) {
    const std::optional<int> status = child.process->Ended();
    if (!status.has_value() || Restarted(child)) ++running;
    if (status.has_value() && !std::exchange(child.reported, true)) {
      events_.ended(child.options.name, child.process->pid(), EndText(*status));
      const absl::Time now = MonotonicNow();
      child.again = now + child.restarts.WaitAfter(now - child.started);
    }
  }
  return running;
}

bool LocalCluster::Restarted(const Child& child) const {
  return options_.restart && (&child != &children_.front() || options_.state != kMemoryState);
}

void LocalCluster::RestartEnded(absl::Time now) {
  for (Child& child : children_) {
    if (!child.reported || !Restarted(child) || now < child.again) continue;
    absl::StatusOr<std::unique_ptr<ChildProcess>> again = ChildProcess::Start(child.options);
    child.started = now;
    if (again.ok()) {
      child.process = *std::move(again);
      child.reported = false;
      events_.started(child.options.name, child.process->pid());
    } else {
      events_.not_restarted(child.options.name, again.status());
      child.again = now + child.restarts.WaitAfter(absl::ZeroDuration());
    }
  }
}

absl::Status LocalCluster::Supervise(StopSignal& stop) {
  do {
    if (ReportEnds() == 0) return absl::UnavailableError("every process of the service has ended");
    RestartEnded(MonotonicNow());
  } while (!stop.WaitFor(kPollEnds));
  return absl::OkStatus();
}

void LocalCluster::StopRange(size_t begin, size_t end, absl::Duration grace) {
  const absl::Time deadline = MonotonicNow() + grace;
  for (size_t i = begin; i < end; ++i) children_[i].process->Signal(SIGTERM);
  bool running = begin < end;
  while (running && MonotonicNow() < deadline) {
    running = false;
    for (size_t i = begin; i < end; ++i) running = running || !children_[i].process->Ended().has_value();
    if (running) poll(nullptr, 0, 10);
  }
  for (size_t i = begin; i < end; ++i) children_[i].process->Signal(SIGKILL);
  for (size_t i = begin; i < end && running; ++i) {
    while (!children_[i].process->Ended().has_value()) poll(nullptr, 0, 1);  // SIGKILL always works
  }
  ReportEnds();
}

// Workers of a node that was killed.
void LocalCluster::StopLeftWorkers() {
  if (!workers_.has_value() || !workers_->AnyRuns()) return;
  workers_->SignalAll(SIGTERM);
  const absl::Time deadline = MonotonicNow() + options_.stop_grace;
  while (workers_->AnyRuns() && MonotonicNow() < deadline) poll(nullptr, 0, 10);
  workers_->SignalAll(SIGKILL);
  while (workers_->AnyRuns()) poll(nullptr, 0, 1);  // SIGKILL always works
  ReportEnds();
}

void LocalCluster::Stop() {
  if (children_.empty()) return;
  StopRange(1, children_.size(), options_.stop_grace + (options_.keep ? kNodeEnds : absl::ZeroDuration()));
  StopLeftWorkers();
  StopRange(0, 1, options_.stop_grace);
}

}  // namespace shardmesh
