#include "tests/testing/cluster.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh::testing {
namespace {

constexpr char kCoordinator[] = "server/shardmesh-coordinator";
constexpr absl::Duration kStartTimeout = absl::Seconds(30);

void AppendTls(const TlsOptions& tls, std::vector<std::string>& command) {
  if (!tls.enabled()) return;
  command.insert(command.end(), {"--tls-cert", tls.cert_file, "--tls-key", tls.key_file, "--tls-ca", tls.ca_file});
}

std::string Milliseconds(absl::Duration duration) { return absl::StrCat(absl::ToInt64Milliseconds(duration)); }

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(ClusterOptions options) {
  std::unique_ptr<Cluster> cluster(new Cluster(std::move(options)));
  RETURN_IF_ERROR(cluster->StartCoordinator("127.0.0.1:0"));
  if (cluster->options_.retained) {
    cluster->nodes_.resize(cluster->options_.hosts);
    for (int h = 0; h < cluster->options_.hosts; ++h) RETURN_IF_ERROR(cluster->StartNode(h));
    return cluster;
  }
  const int workers = cluster->options_.workers;
  for (int i = 0; i < workers; ++i) RETURN_IF_ERROR(cluster->LaunchWorker(absl::StrCat("w", i)));
  for (int i = 0; i < workers; ++i) RETURN_IF_ERROR(cluster->AwaitWorker(absl::StrCat("w", i)));
  return cluster;
}

Cluster::~Cluster() {
  workers_.clear();
  nodes_.clear();
  for (int i = 0; i < options_.workers && options_.retained; ++i) {  // they outlive a node that is killed
    if (const pid_t pid = PidOf(RetainedName(i)); pid > 0) kill(pid, SIGKILL);
  }
  coordinator_.reset();
  if (::testing::Test::HasFailure()) PrintLogs();
}

absl::Status Cluster::StartCoordinator(const std::string& listen) {
  const std::string address_file = folder_.File(absl::StrCat("coordinator-", ++coordinator_starts_, ".address"));
  std::vector<std::string> command = {kCoordinator,
                                      "--listen",
                                      listen,
                                      "--state",
                                      StateFile(),
                                      "--address-file",
                                      address_file,
                                      "--heartbeat-interval-ms",
                                      Milliseconds(options_.heartbeat_interval),
                                      "--heartbeat-timeout-ms",
                                      Milliseconds(options_.heartbeat_timeout)};
  AppendTls(options_.tls, command);
  if (!options_.default_mesh.empty()) command.insert(command.end(), {"--default-mesh", options_.default_mesh});
  ASSIGN_OR_RETURN(coordinator_,
                   Process::Start({std::move(command), folder_.File("coordinator.log"), options_.descriptor_limit,
                                                options_.coordinator_environment}));
  ASSIGN_OR_RETURN(coordinator_address_, AwaitLine(address_file, *coordinator_, kStartTimeout));
  return absl::OkStatus();
}

absl::Status Cluster::RestartCoordinator() { return StartCoordinator(std::string(coordinator_address_)); }

std::string Cluster::RetainedName(int worker) const {
  if (options_.hosts == 1) return absl::StrCat("w-", worker);
  const int per_host = options_.workers / options_.hosts;
  return absl::StrCat("w", worker / per_host, "-", worker % per_host);
}

std::string Cluster::NodeFile(int host, const std::string& suffix) const {
  return folder_.File(absl::StrCat("node", options_.hosts == 1 ? "" : absl::StrCat(host), suffix));
}

absl::Status Cluster::StartNode(int host) {
  const bool several = options_.hosts > 1;
  std::vector<std::string> command = {"worker/shardmesh-node",
                                      "--coordinator",
                                      coordinator_address_,
                                      "--workers",
                                      absl::StrCat(options_.workers / options_.hosts),
                                      "--name",
                                      several ? absl::StrCat("w", host) : "w",
                                      "--worker-binary",
                                      options_.worker_program,
                                      "--local-dir",
                                      folder_.File(several ? absl::StrCat("s", host) : "s"),
                                      "--",
                                      "--threads",
                                      absl::StrCat(options_.threads)};
  command.insert(command.end(), options_.worker_flags.begin(), options_.worker_flags.end());
  AppendTls(options_.tls, command);
  if (several) {
    command.insert(command.end(), {"--group-address", "127.0.0.1", "--host-name", absl::StrCat("host", host)});
  }
  ASSIGN_OR_RETURN(nodes_[host], Process::Start({std::move(command), NodeFile(host, ".log"), options_.descriptor_limit,
                                                 options_.worker_environment}));
  return absl::OkStatus();
}

absl::Status Cluster::RestartNode(absl::Duration timeout) {
  node().Kill9();
  return StartNodeAgain(timeout);
}

absl::Status Cluster::StartNodeAgain(absl::Duration timeout) {
  const std::string log = folder_.File("node.log");
  const size_t before = ReadFile(log).size();
  RETURN_IF_ERROR(StartNode());
  const absl::Time deadline = MonotonicNow() + timeout;
  std::string missing;
  do {
    poll(nullptr, 0, 10);
    const std::string said = ReadFile(log).substr(before);
    missing.clear();
    for (int i = 0; i < options_.workers; ++i) {
      const std::string name = absl::StrCat("w-", i);
      if (!absl::StrContains(said, absl::StrCat("event=retained_again worker=", name, " "))) missing += " " + name;
    }
  } while (!missing.empty() && MonotonicNow() < deadline && node().alive());
  if (missing.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("the new node has no memory of", missing));
}

pid_t Cluster::PidOf(const std::string& name) const {
  const absl::string_view end("\0", 1);  // of an argument
  const std::string of_name = absl::StrCat("--name", end, name, end), of_folder = folder_.File("s");
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    const std::string command = ReadFile(absl::StrCat("/proc/", pid, "/cmdline"));
    if (command.find(of_name) != std::string::npos && command.find(of_folder) != std::string::npos) return pid;
  }
  return 0;
}

pid_t Cluster::AwaitNextIncarnation(const std::string& name, pid_t before, absl::Duration timeout) const {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (MonotonicNow() < deadline) {
    if (const pid_t pid = PidOf(name); pid > 0 && pid != before) return pid;
    poll(nullptr, 0, 5);
  }
  return 0;
}

absl::Status Cluster::LaunchWorker(const std::string& name) {
  WorkerProcess& worker = workers_[name];
  const std::string address_file = folder_.File(absl::StrCat(name, "-", ++worker.incarnations, ".address"));
  std::vector<std::string> command = {options_.worker_program,
                                      "--coordinator",
                                      coordinator_address_,
                                      "--name",
                                      name,
                                      "--local-dir",
                                      folder_.File("s"),
                                      "--threads",
                                      absl::StrCat(options_.threads),
                                      "--address-file",
                                      address_file};
  command.insert(command.end(), options_.worker_flags.begin(), options_.worker_flags.end());
  const auto own = options_.worker_tls.find(name);
  AppendTls(own == options_.worker_tls.end() ? options_.tls : own->second, command);
  if (options_.hosts > 1) {
    const int host = std::atoi(name.c_str() + 1) * options_.hosts / options_.workers;
    command.insert(command.end(), {"--group-address", "127.0.0.1", "--host-name", absl::StrCat("host", host)});
  }
  ASSIGN_OR_RETURN(worker.process, Process::Start({std::move(command), folder_.File(absl::StrCat(name, ".log")),
                                                   options_.descriptor_limit, options_.worker_environment}));
  return absl::OkStatus();
}

absl::Status Cluster::AwaitWorker(const std::string& name) {
  WorkerProcess& worker = workers_.at(name);
  const std::string address_file = folder_.File(absl::StrCat(name, "-", worker.incarnations, ".address"));
  ASSIGN_OR_RETURN(worker.address, AwaitLine(address_file, *worker.process, kStartTimeout));
  return absl::OkStatus();
}

absl::Status Cluster::StartWorker(const std::string& name) {
  RETURN_IF_ERROR(LaunchWorker(name));
  return AwaitWorker(name);
}

absl::StatusOr<Client> Cluster::Connect(ClientOptions options) const {
  if (!options.tls.enabled()) options.tls = options_.tls;
  return Client::Connect(coordinator_address_, std::move(options));
}

void Cluster::PrintLogs() const {
  std::cout << "--- coordinator\n" << ReadFile(folder_.File("coordinator.log"));
  for (int h = 0; h < options_.hosts && options_.retained; ++h) {
    std::cout << "--- node " << h << " and its workers\n" << ReadFile(NodeFile(h, ".log"));
  }
  for (const auto& [name, worker] : workers_) {
    std::cout << "--- worker " << name << "\n" << ReadFile(folder_.File(absl::StrCat(name, ".log")));
  }
}

}  // namespace shardmesh::testing
