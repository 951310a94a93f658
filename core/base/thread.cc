#include "core/base/thread.h"

#include <sys/resource.h>

#include <fstream>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/sync.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Seconds(1);  // a wait has a limit, although nothing is looked for

std::string LimitText(__rlimit_resource resource) {
  rlimit limit;
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return absl::StrCat(limit.rlim_cur);
}

// Of the control group that the process is in, as it sees that.
std::string PidsMax() {
  std::string line, group;
  for (std::ifstream groups("/proc/self/cgroup"); std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) group = line.substr(3);
  }
  std::string most;
  for (const std::string& folder : {"/sys/fs/cgroup" + group, std::string("/sys/fs/cgroup")}) {
    if (std::getline(std::ifstream(folder + "/pids.max"), most)) return most;
  }
  return "";
}

}  // namespace

std::string ThreadLimits() {
  const std::string pids = PidsMax();
  return absl::StrCat("RLIMIT_NPROC is ", LimitText(RLIMIT_NPROC), ", RLIMIT_AS is ", LimitText(RLIMIT_AS),
                      pids.empty() ? "" : absl::StrCat(", pids.max is ", pids));
}

absl::StatusOr<std::thread> StartThread(absl::string_view what, std::function<void()> run) {
  std::string reason;
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    reason = error.what();
  } catch (const std::bad_alloc&) {
    reason = "out of memory";
  }
  return absl::ResourceExhaustedError(absl::StrCat("no thread is left for ", what, " (", reason, "): ", ThreadLimits(),
                                                   "; raise the limit, or ask for less at once"));
}

absl::Status StatusOfException(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return absl::ResourceExhaustedError("out of memory; ask for less, or give the process more memory");
  }
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again) {
    return absl::ResourceExhaustedError(absl::StrCat("no thread is left (", error.what(), "): ", ThreadLimits(),
                                                     "; raise the limit, or ask for less at once"));
  }
  return absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
}

absl::Status CheckThreads(int threads) {
  Mutex mu;
  CondVar all_made;
  bool over = false;
  std::vector<std::thread> made;
  absl::Status status;
  while (status.ok() && static_cast<int>(made.size()) < threads) {
    absl::StatusOr<std::thread> thread = StartThread("the check of limits", [&] {
      MutexLock lock(mu);
      while (!over) all_made.WaitFor(mu, kLook);
    });
    status = thread.status();
    if (thread.ok()) made.push_back(*std::move(thread));
  }
  {
    MutexLock lock(mu);
    over = true;
  }
  all_made.SignalAll();
  for (std::thread& thread : made) thread.join();
  if (status.ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("a process of this service needs ", threads,
                                                    " threads, and more with every job and connection; it gets ",
                                                    made.size(), ": ", ThreadLimits(), "; raise the limit"));
}

}  // namespace shardmesh
