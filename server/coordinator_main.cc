// shardmesh-coordinator: the process that knows jobs, names, layouts and workers.
//   shardmesh-coordinator --listen 127.0.0.1:7000 --state ./shardmesh.db
// Exit status: 0 after SIGTERM or SIGINT; 1 when it could not start or was told nonsense (one line on stderr says why);
// 2 for a command line that it does not understand.
#include <spdlog/spdlog.h>
#include <stdio.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/decimal_flags.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "rpc/base/main_support.h"
#include "rpc/server.h"
#include "rpc/tls/tls_flags.h"
#include "server/coordinator/coordinator.h"
#include "server/service/coordinator_service.h"
#include "server/service/hosts_service.h"
#include "server/store/store.h"

namespace shardmesh {
namespace {

constexpr char kVersion[] = "shardmesh-coordinator 0.1.0";
constexpr absl::Duration kDrainGrace = absl::Seconds(5);
constexpr char kExamples[] = R"(Examples:
  shardmesh-coordinator                                  on this machine only, state in ./shardmesh.db
  shardmesh-coordinator --state :memory: --default-mesh ddp=2,fsdp=2
  shardmesh-coordinator --listen 0.0.0.0:7000 --tls-cert server.pem --tls-key server.key --tls-ca ca.pem)";

struct Flags {
  ServerOptions server;
  std::string state = "./shardmesh.db";
  int heartbeat_interval_ms = 500;
  int heartbeat_timeout_ms = 3000;
  int max_workers = CoordinatorOptions().max_workers;
  std::string default_mesh;
  std::string log_level = "info";
  std::string address_file;
};

void AddFlags(CLI::App& app, Flags& flags) {
  flags.server.listen = "127.0.0.1:7000";
  flags.server.max_message_bytes = 64 << 20;  // a job of 100,000 parameters with long names
  flags.server.read_chunk_bytes = 64 << 10;   // heartbeats come between those of a flood
  flags.server.memory_quota_bytes = 512 << 20;
  flags.server.measures_bandwidth = false;
  app.add_option("--listen", flags.server.listen,
                 "host:port or unix:path; port 0 has one chosen; beyond this machine TLS is needed")
      ->capture_default_str();
  app.add_option("--state", flags.state, "file that keeps jobs and workers, or :memory:")->capture_default_str();
  app.add_option("--heartbeat-interval-ms", flags.heartbeat_interval_ms, "how often workers report")
      ->check(CLI::Range(10, 60'000))
      ->capture_default_str();
  app.add_option("--heartbeat-timeout-ms", flags.heartbeat_timeout_ms,
                 "silence after which a worker counts as dead; at least twice the interval; below 1000 for tests only")
      ->check(CLI::Range(100, 600'000))
      ->capture_default_str();
  app.add_option("--default-mesh", flags.default_mesh, "mesh of jobs that name none, e.g. ddp=2,fsdp=2");
  AddTlsFileFlags(app, flags.server.tls);
  app.add_option("--max-connections", flags.server.max_connections, "open connections in all")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_option("--max-workers", flags.max_workers, "names of workers known at once")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--log-level", flags.log_level, "trace, debug, info, warn, error or off")->capture_default_str();
  app.add_option("--address-file", flags.address_file, "file to write host:port to, once calls are served");
  app.set_version_flag("--version", kVersion);
  app.footer(kExamples);
}

// Appears whole: written beside it, then renamed.
absl::Status WriteAddressFile(const std::string& path, const std::string& address) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".new");
  FILE* file = fopen(temporary.c_str(), "w");
  bool good = file != nullptr && fprintf(file, "%s\n", address.c_str()) > 0;
  if (file != nullptr) good = fclose(file) == 0 && good;
  if (good && rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot write --address-file ", path, "; check that its folder may be written"));
}

// Workers of a node that is gone speak every 150 ms for a while, but a machine may be slow; those of an older build speak
// in each interval.
absl::Duration HostTimeout(const Flags& flags) {
  constexpr int kShortest = 500;
  return absl::Milliseconds(std::max({flags.heartbeat_timeout_ms / 4, flags.heartbeat_interval_ms * 3 / 2, kShortest}));
}

absl::StatusOr<std::unique_ptr<CoordinatorService>> MakeService(const Flags& flags, const Clock& clock) {
  CoordinatorServiceOptions options;
  options.heartbeat_interval = absl::Milliseconds(flags.heartbeat_interval_ms);
  options.heartbeat_timeout = absl::Milliseconds(flags.heartbeat_timeout_ms);
  if (flags.heartbeat_timeout_ms < 2 * flags.heartbeat_interval_ms) {
    return absl::InvalidArgumentError(absl::StrCat("--heartbeat-timeout-ms ", flags.heartbeat_timeout_ms,
                                                   " is less than twice --heartbeat-interval-ms ",
                                                   flags.heartbeat_interval_ms));
  }
  if (!flags.default_mesh.empty()) {
    absl::StatusOr<MeshSpec> mesh = ParseMeshSpec(flags.default_mesh);
    if (!mesh.ok()) return Annotate(mesh.status(), "--default-mesh");
    options.default_mesh = *std::move(mesh);
  }
  std::unique_ptr<Store> store;
  if (flags.state == ":memory:") {
    store = NewMemoryStore();
  } else {
    ASSIGN_OR_RETURN(store, NewSqliteStore(flags.state));
  }
  CoordinatorOptions machine;
  machine.heartbeat_timeout = options.heartbeat_timeout;
  machine.host_timeout = HostTimeout(flags);
  machine.max_workers = flags.max_workers;
  options.max_jobs = machine.max_jobs;
  ASSIGN_OR_RETURN(auto coordinator, Coordinator::Create(machine, std::move(store), clock.Now()));
  return std::make_unique<CoordinatorService>(options, std::move(coordinator), clock);
}

absl::Status Run(const Flags& flags) {
  StopSignal stop;
  RETURN_IF_ERROR(PrepareProcess({flags.log_level}));
  const RealClock clock;
  ASSIGN_OR_RETURN(const std::unique_ptr<CoordinatorService> service, MakeService(flags, clock));
  HostsService hosts(*service);
  ASSIGN_OR_RETURN(const std::unique_ptr<Server> server, Server::Start(flags.server, {service.get(), &hosts}));
  if (!flags.address_file.empty()) RETURN_IF_ERROR(WriteAddressFile(flags.address_file, server->address()));
  spdlog::info("event=listening address={} state={} heartbeat_timeout_ms={}", server->address(), Quoted(flags.state),
               flags.heartbeat_timeout_ms);
  // Ticks come a few times in a timeout, whatever the interval, and in that of a host.
  const absl::Duration every =
      absl::Milliseconds(std::min(flags.heartbeat_interval_ms, flags.heartbeat_timeout_ms / 8));
  absl::Time next = clock.Now() + every;
  bool store_works = true;
  while (!stop.WaitFor(std::min(every, HostTimeout(flags) / 8))) {
    absl::Status ticked = service->TickHosts();
    if (clock.Now() >= next) {
      next = clock.Now() + every;
      ticked.Update(service->Tick());
    }
    if (!ticked.ok() && store_works) spdlog::error("event=store_failed error={}", Quoted(ticked.message()));
    if (ticked.ok() && !store_works) spdlog::info("event=store_works_again");
    store_works = ticked.ok();
  }
  spdlog::info("event=stopping");
  hosts.End();
  server->Drain(kDrainGrace);
  (void)service->Tick();  // stores what heartbeats said last
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{"The coordinator of shardmesh: jobs, names, layouts, workers, versions."};
  AddFlags(app, flags);
  DecimalNumbersOnly(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const absl::Status status = Run(flags);
  if (status.ok()) return 0;
  std::cerr << "shardmesh-coordinator: " << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace shardmesh

int main(int argc, char** argv) { return shardmesh::Main(argc, argv); }
