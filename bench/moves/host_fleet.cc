#include "bench/moves/host_fleet.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "rpc/tls/tls.h"

namespace shardmesh::bench {
namespace {

constexpr char kNet[] = "10.213.81.", kHere[] = "10.213.81.1";
constexpr int kFirst = 11;
constexpr int kNames = 100'000;  // names of interfaces have at most 15 characters
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status Ip(const std::string& arguments) {
  if (std::system(absl::StrCat("ip ", arguments, " 2>/dev/null").c_str()) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("`ip ", arguments, "` failed; network namespaces are needed"));
}

std::vector<std::string> TlsFlags(const std::string& folder) {
  return {"--tls-cert", folder + "/fleet.pem", "--tls-key", folder + "/fleet.key", "--tls-ca", folder + "/ca.pem"};
}

// 0: there is no such process any more.
pid_t ParentOf(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  const size_t name_end = line.rfind(')');  // "PID (NAME) STATE PARENT ..."
  return name_end == std::string::npos || name_end + 4 >= line.size() ? 0 : std::atoi(line.c_str() + name_end + 4);
}

}  // namespace

HostFleet::HostFleet(const HostFleetOptions& options)
    : options_(options), bridge_(absl::StrCat("smlb", getpid() % kNames)), nodes_(options.hosts) {
  for (int h = 0; h < options.hosts; ++h) names_.push_back(absl::StrCat("shardmesh-loss-", getpid(), "-", h));
}

HostFleet::~HostFleet() {
  for (int h = 0; h < options_.hosts; ++h) {  // workers outlive a node that is killed
    if (nodes_[h] != nullptr) Kill(h, WorkersOf(h));
  }
  for (const std::string& name : names_) Ip("netns del " + name).IgnoreError();
  Ip("link del " + bridge_).IgnoreError();
}

absl::StatusOr<std::unique_ptr<HostFleet>> HostFleet::Create(const HostFleetOptions& options) {
  if (geteuid() != 0) {
    return absl::PermissionDeniedError("only root may make network namespaces; run it as root");
  }
  std::unique_ptr<HostFleet> fleet(new HostFleet(options));
  ASSIGN_OR_RETURN(fleet->folder_, Folder::Make());
  RETURN_IF_ERROR(fleet->CreateHosts());
  RETURN_IF_ERROR(fleet->MakeCertificates());
  return fleet;
}

std::string HostFleet::address(int host) const { return absl::StrCat(kNet, kFirst + host); }

absl::Status HostFleet::CreateHosts() {
  RETURN_IF_ERROR(Ip(absl::StrCat("link add ", bridge_, " type bridge")));
  RETURN_IF_ERROR(Ip(absl::StrCat("addr add ", kHere, "/24 dev ", bridge_)));
  RETURN_IF_ERROR(Ip(absl::StrCat("link set ", bridge_, " up")));
  for (int h = 0; h < options_.hosts; ++h) {
    const std::string& host = names_[h];
    const std::string link = absl::StrCat("smlv", getpid() % kNames, "-", h);
    RETURN_IF_ERROR(Ip("netns add " + host));
    RETURN_IF_ERROR(Ip(absl::StrCat("-n ", host, " link set lo up")));
    RETURN_IF_ERROR(Ip(absl::StrCat("link add ", link, " type veth peer name veth0 netns ", host)));
    RETURN_IF_ERROR(Ip(absl::StrCat("-n ", host, " addr add ", address(h), "/24 dev veth0")));
    RETURN_IF_ERROR(Ip(absl::StrCat("-n ", host, " link set veth0 up")));
    RETURN_IF_ERROR(Ip(absl::StrCat("link set ", link, " master ", bridge_, " up")));
  }
  return absl::OkStatus();
}

// One for all, with the addresses of the hosts and of this process.
absl::Status HostFleet::MakeCertificates() const {
  std::string names = absl::StrCat("subjectAltName=IP:", kHere);
  for (int h = 0; h < options_.hosts; ++h) absl::StrAppend(&names, ",IP:", address(h));
  std::ofstream(folder() + "/fleet.ext") << names << "\n";
  const std::string key = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
  const std::string command =
      absl::StrCat("cd ", folder(), " && (", key, "-subj /CN=authority -x509 -days 2 -keyout ca.key -out ca.pem && ",
                   key, "-subj /CN=fleet -keyout fleet.key -out fleet.csr && openssl x509 -req -days 2 -in fleet.csr ",
                   "-CA ca.pem -CAkey ca.key -CAcreateserial -extfile fleet.ext -out fleet.pem) >openssl.log 2>&1");
  if (std::system(command.c_str()) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("the openssl program could not make certificates; install openssl");
}

absl::Status HostFleet::Start() {
  // Workers whose node was killed become this process's children, so that it can await their end.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const int64_t timeout_ms = absl::ToInt64Milliseconds(options_.heartbeat_timeout);
  const std::string address_file = folder() + "/coordinator.address";
  std::vector<std::string> command = {ProgramPath("server/shardmesh-coordinator"),
                                      "--listen",
                                      absl::StrCat(kHere, ":0"),
                                      "--state",
                                      folder() + "/state.db",
                                      "--heartbeat-interval-ms",
                                      absl::StrCat(timeout_ms / 6),
                                      "--heartbeat-timeout-ms",
                                      absl::StrCat(timeout_ms),
                                      "--address-file",
                                      address_file,
                                      "--log-level",
                                      "error"};
  for (std::string& flag : TlsFlags(folder())) command.push_back(std::move(flag));
  ASSIGN_OR_RETURN(coordinator_, Process::Start(command, Process::kEveryCore));
  ASSIGN_OR_RETURN(coordinator_address_, coordinator_->AwaitFile(address_file, kPatience));
  for (int h = 0; h < options_.hosts; ++h) RETURN_IF_ERROR(StartHost(h));
  return absl::OkStatus();
}

absl::Status HostFleet::StartHost(int host) {
  const std::string files = absl::StrCat(folder(), "/h", host);
  std::error_code ignored;
  std::filesystem::create_directories(files, ignored);  // a folder that cannot be made is an error of the node
  std::vector<std::string> command = {ProgramPath("worker/shardmesh-node"),
                                      "--coordinator",
                                      coordinator_address_,
                                      "--workers",
                                      absl::StrCat(options_.workers),
                                      "--name",
                                      absl::StrCat("h", host),
                                      "--worker-binary",
                                      ProgramPath("worker/shardmesh-worker"),
                                      "--local-dir",
                                      files + "/local",
                                      "--log-dir",
                                      files,
                                      "--log-level",
                                      "error",
                                      "--",
                                      "--listen",
                                      absl::StrCat(address(host), ":0"),
                                      "--group-address",
                                      address(host)};
  for (std::string& flag : TlsFlags(folder())) command.push_back(std::move(flag));
  ASSIGN_OR_RETURN(nodes_[host], StartOn(host, std::move(command)));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Process>> HostFleet::StartOn(int host, std::vector<std::string> command) const {
  command.insert(command.begin(), {"/usr/bin/env", "ip", "netns", "exec", names_[host]});
  return Process::Start(command, Process::kEveryCore);
}

std::vector<pid_t> HostFleet::WorkersOf(int host) const {
  std::vector<pid_t> workers;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid > 0 && ParentOf(pid) == nodes_[host]->pid()) workers.push_back(pid);
  }
  return workers;
}

absl::StatusOr<double> HostFleet::KillHost(int host) {
  const std::vector<pid_t> workers = WorkersOf(host);
  if (static_cast<int>(workers.size()) != options_.workers) {
    return absl::InternalError(
        absl::StrCat("host ", host, " has ", workers.size(), " workers; it was started with ", options_.workers));
  }
  const double at = MonotonicSeconds();
  Kill(host, workers);
  return at;
}

// The node first: it would start its workers again.
void HostFleet::Kill(int host, const std::vector<pid_t>& workers) {
  kill(nodes_[host]->pid(), SIGKILL);
  for (const pid_t worker : workers) kill(worker, SIGKILL);
  nodes_[host].reset();
  for (const pid_t worker : workers) waitpid(worker, nullptr, 0);
}

absl::StatusOr<Client> HostFleet::Connect(const std::string& coordinator, const std::string& folder) {
  ClientOptions options;
  options.tls.cert_file = folder + "/fleet.pem";
  options.tls.key_file = folder + "/fleet.key";
  options.tls.ca_file = folder + "/ca.pem";
  return Client::Connect(coordinator, options);
}

}  // namespace shardmesh::bench
