#include "bench/service.h"

#include <stdlib.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace shardmesh::bench {
namespace {
constexpr absl::Duration kPatience = absl::Seconds(60);
}  // namespace

absl::StatusOr<std::unique_ptr<Folder>> Folder::Make() {
  std::string path = (std::filesystem::temp_directory_path() / "shardmesh-bench-XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr)
    return absl::PermissionDeniedError(absl::StrCat("cannot make a folder like ", path));
  return std::unique_ptr<Folder>(new Folder(path));
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<std::unique_ptr<Service>> Service::Start(const std::string& folder, const std::string& worker_listen,
                                                        int core, absl::Duration spin) {
  std::unique_ptr<Service> service(new Service);
  const std::string coordinator_file = folder + "/coordinator", worker_file = folder + "/worker";
  ASSIGN_OR_RETURN(service->coordinator_,
                   Process::Start({ProgramPath("server/shardmesh-coordinator"), "--listen", "127.0.0.1:0", "--state",
                                   folder + "/state.db", "--address-file", coordinator_file, "--log-level", "warn"},
                                  core));
  ASSIGN_OR_RETURN(const std::string address, service->coordinator_->AwaitFile(coordinator_file, kPatience));
  ASSIGN_OR_RETURN(service->worker_, Process::Start({ProgramPath("worker/shardmesh-worker"), "--coordinator", address,
                                                     "--name", "w0", "--listen", worker_listen, "--local-dir",
                                                     folder + "/local", "--address-file", worker_file, "--log-level",
                                                     "warn", "--spin", absl::StrCat(absl::ToDoubleSeconds(spin))},
                                                    core));
  RETURN_IF_ERROR(service->worker_->AwaitFile(worker_file, kPatience).status());
  ClientOptions options;
  options.spin = spin;
  ASSIGN_OR_RETURN(Client client, Client::Connect(address, std::move(options)));
  service->client_ = std::make_unique<Client>(std::move(client));
  return service;
}

}  // namespace shardmesh::bench
