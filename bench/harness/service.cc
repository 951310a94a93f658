#include "bench/harness/service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {
constexpr absl::Duration kPatience = absl::Seconds(60);
}  // namespace

absl::StatusOr<std::unique_ptr<Service>> Service::Start(const std::string& folder, const std::string& worker_listen,
                                                        int core, absl::Duration spin, int workers, int hosts) {
  std::unique_ptr<Service> service(new Service);
  const std::string coordinator_file = folder + "/coordinator";
  ASSIGN_OR_RETURN(service->coordinator_,
                   Process::Start({ProgramPath("server/shardmesh-coordinator"), "--listen", "127.0.0.1:0", "--state",
                                   folder + "/state.db", "--address-file", coordinator_file, "--log-level", "error"},
                                  core));
  ASSIGN_OR_RETURN(const std::string address, service->coordinator_->AwaitFile(coordinator_file, kPatience));
  for (int i = 0; i < workers; ++i) {
    const std::string name = absl::StrCat("w", i), file = absl::StrCat(folder, "/worker", i);
    std::vector<std::string> command = {ProgramPath("worker/shardmesh-worker"),
                                        "--coordinator",
                                        address,
                                        "--name",
                                        name,
                                        "--listen",
                                        worker_listen,
                                        "--local-dir",
                                        folder + "/local",
                                        "--address-file",
                                        file,
                                        "--log-level",
                                        "warn",
                                        "--spin",
                                        absl::StrCat(absl::ToDoubleSeconds(spin))};
    if (hosts > 1) {
      command.insert(command.end(),
                     {"--host-name", absl::StrCat("host", i * hosts / workers), "--group-address", "127.0.0.1"});
    }
    ASSIGN_OR_RETURN(std::unique_ptr<Process> worker, Process::Start(command, core));
    RETURN_IF_ERROR(worker->AwaitFile(file, kPatience).status());
    service->workers_.push_back(std::move(worker));
  }
  service->address_ = address;
  ClientOptions options;
  options.spin = spin;
  ASSIGN_OR_RETURN(Client client, Client::Connect(address, std::move(options)));
  service->client_ = std::make_unique<Client>(std::move(client));
  return service;
}

}  // namespace shardmesh::bench
