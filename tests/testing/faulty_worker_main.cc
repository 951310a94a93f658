// shardmesh-worker that comes to harm at a fault point (core/fault_point.h), as the environment says:
//
//   SHARDMESH_FAULT=WORKER:POINT:ACTION:NTH     w1:chunk-stepped:kill:3
//
// (Several, one for each worker, divided by commas.)
// When worker WORKER is at POINT for the NTH time it is killed (SIGKILL), or stopped (SIGSTOP), or waits 300 ms
// (delay), or meets an error there, RESOURCE_EXHAUSTED (error; at points that can fail). Without the variable, or in
// another worker, nothing happens. `shardctl faults` (//client/cli:shardctl_with_faults) lists the points.
// SHARDMESH_FAULT_ONCE=FILE: only the life that makes this file comes to harm; those after it do not.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/fault_point.h"
#include "worker/run_worker_main.h"

namespace {

constexpr int kDelayMillis = 300;

shardmesh::FaultPointInfo planned;
std::string action;
std::atomic<int> times_left{0};

absl::Status Harm(shardmesh::FaultPoint at) {
  if (at != planned.point || times_left.fetch_sub(1) != 1) return absl::OkStatus();
  const char* const once = std::getenv("SHARDMESH_FAULT_ONCE");
  if (once != nullptr && open(once, O_WRONLY | O_CREAT | O_EXCL, 0600) < 0) return absl::OkStatus();
  if (action == "kill") kill(getpid(), SIGKILL);
  if (action == "stop") raise(SIGSTOP);  // this thread: of a signal to the process it might see nothing for a while
  if (action == "delay") poll(nullptr, 0, kDelayMillis);
  if (action != "error") return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("fault injected at ", planned.name));
}

// False: it says nothing that can be done.
bool PlanOne(absl::string_view text, const std::string& worker) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  int times = 0;
  if (parts.size() != 4 || !absl::SimpleAtoi(parts[3], &times) || times < 1) return false;
  const bool error = parts[2] == "error";
  if (parts[2] != "kill" && parts[2] != "stop" && parts[2] != "delay" && !error) return false;
  for (const shardmesh::FaultPointInfo& info : shardmesh::kFaultPoints) {
    if (parts[1] != info.name) continue;
    if (error && !info.can_fail) return false;
    if (parts[0] != worker) return true;
    planned = info;
    action = parts[2];
    times_left = times;
    shardmesh::fault_hook = Harm;
    return true;
  }
  return false;
}

bool Plan(const std::string& text, const std::string& worker) {
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    if (!PlanOne(one, worker)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::string name;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--name") == 0 && i + 1 < argc) name = argv[i + 1];
  }
  if (const char* text = std::getenv("SHARDMESH_FAULT"); text != nullptr && !Plan(text, name)) {
    std::fprintf(
        stderr, "SHARDMESH_FAULT is \"%s\"; it is WORKER:POINT:kill|stop|delay:NTH, or error at points that can fail\n",
        text);
    return 2;
  }
  return shardmesh::RunWorkerMain(argc, argv, {});
}
