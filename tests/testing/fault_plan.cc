#include "tests/testing/fault_plan.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/fault_point.h"

namespace shardmesh::testing {
namespace {

constexpr int kDelayMillis = 300;

FaultPointInfo planned;
std::string action;
std::atomic<int> times_left{0};

absl::Status Harm(FaultPoint at) {
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
bool PlanOne(absl::string_view text, const std::string& process) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  int times = 0;
  if (parts.size() != 4 || !absl::SimpleAtoi(parts[3], &times) || times < 1) return false;
  const bool error = parts[2] == "error";
  if (parts[2] != "kill" && parts[2] != "stop" && parts[2] != "delay" && !error) return false;
  for (const FaultPointInfo& info : kFaultPoints) {
    if (parts[1] != info.name) continue;
    if (error && !info.can_fail) return false;
    if (parts[0] != process) return true;
    planned = info;
    action = parts[2];
    times_left = times;
    fault_hook = Harm;
    return true;
  }
  return false;
}

bool Plan(const std::string& text, const std::string& process) {
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    if (!PlanOne(one, process)) return false;
  }
  return true;
}

}  // namespace

absl::Status PlanFault(const std::string& name) {
  const char* const text = std::getenv("SHARDMESH_FAULT");
  if (text == nullptr || Plan(text, name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "SHARDMESH_FAULT is \"", text, "\"; it is NAME:POINT:kill|stop|delay:NTH, or error at points that can fail"));
}

}  // namespace shardmesh::testing
