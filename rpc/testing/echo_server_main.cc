// A process that serves EchoService, for the tests that starve, stop or kill a server.
// Usage: echo_server LISTEN DESCRIPTOR_LIMIT (0: leave it). Prints its address and a newline, and ends on SIGTERM.
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>

#include "rpc/base/main_support.h"
#include "rpc/server.h"
#include "rpc/testing/echo_service.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  shardmesh::StopSignal stop;
  shardmesh::ProcessOptions process;
  process.raise_descriptor_limit = false;
  if (const absl::Status prepared = shardmesh::PrepareProcess(process); !prepared.ok()) return 2;
  if (const int limit = std::atoi(argv[2]); limit > 0) {
    const rlimit descriptors = {static_cast<rlim_t>(limit), static_cast<rlim_t>(limit)};
    if (setrlimit(RLIMIT_NOFILE, &descriptors) != 0) return 2;
  }
  shardmesh::testing::EchoService service;
  shardmesh::ServerOptions options;
  options.listen = argv[1];
  options.max_message_bytes = 1 << 20;
  options.memory_quota_bytes = 64 << 20;
  auto server = shardmesh::Server::Start(options, {&service});
  if (!server.ok()) {
    spdlog::error("event=start_failed error={}", shardmesh::Quoted(server.status().message()));
    return 1;
  }
  std::printf("%s\n", (*server)->address().c_str());
  std::fflush(stdout);
  while (!stop.WaitFor(absl::Minutes(1))) {
  }
  (*server)->Drain(absl::Seconds(1));
  return 0;
}
