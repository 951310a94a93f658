#include "bench/harness/worker_team.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh::bench {
namespace {
constexpr double kTaskSeconds = 120, kBarrierSeconds = 60;
constexpr absl::Duration kSlice = absl::Milliseconds(200);
}  // namespace

absl::StatusOr<std::unique_ptr<WorkerTeam>> WorkerTeam::Start(int size, Setup setup) {
  std::unique_ptr<WorkerTeam> team(new WorkerTeam);
  void* page = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return absl::ResourceExhaustedError("no memory for a page of control words");
  team->page_ = static_cast<Page*>(page);
  team->size_ = size;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) return absl::ResourceExhaustedError(absl::StrCat("fork of member ", rank, " failed"));
    if (pid == 0) {
      team->children_.clear();  // those are not this process's to end
      team->ChildLoop(rank, setup);
      _exit(0);
    }
    team->children_.push_back(pid);
  }
  return team;
}

WorkerTeam::~WorkerTeam() {
  for (pid_t pid : children_) kill(pid, SIGKILL);
  for (pid_t pid : children_) waitpid(pid, nullptr, 0);
  if (page_ != nullptr) munmap(page_, sizeof(Page));
}

void WorkerTeam::ChildLoop(int rank, const Setup& setup) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  PinTo(rank);
  uint32_t seen = 0;  // whatever the parent asked for meanwhile is still to be done
  Member member(*this, rank);
  const Work work = setup(member);
  while (true) {
    while (page_->go.load(std::memory_order_acquire) == seen) FutexWait(page_->go, seen, kSlice);
    ++seen;
    if (!work(page_->task.load())) page_->wrong.fetch_add(1);
    page_->finished.fetch_add(1, std::memory_order_acq_rel);
    FutexBump(page_->done);
  }
}

absl::Status WorkerTeam::CheckChildren() {
  for (pid_t pid : children_) {
    if (waitpid(pid, nullptr, WNOHANG) == pid)
      return absl::InternalError(absl::StrCat("worker process ", pid, " ended"));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> WorkerTeam::Run(int task) {
  page_->task.store(task);
  page_->finished.store(0);
  page_->wrong.store(0);
  const double start = MonotonicSeconds();
  FutexBump(page_->go);
  while (true) {
    const uint32_t seen = page_->done.load(std::memory_order_acquire);
    if (page_->finished.load(std::memory_order_acquire) == static_cast<int>(children_.size())) break;
    FutexWait(page_->done, seen, kSlice);
    RETURN_IF_ERROR(CheckChildren());
    if (MonotonicSeconds() - start > kTaskSeconds)
      return absl::DeadlineExceededError(absl::StrCat("task ", task, " hangs"));
  }
  const double seconds = MonotonicSeconds() - start;
  if (page_->wrong.load() > 0) {
    return absl::InternalError(absl::StrCat(page_->wrong.load(), " workers found a wrong result in task ", task));
  }
  return seconds;
}

double WorkerTeam::ProcessorSeconds() const {
  double seconds = 0;
  for (pid_t pid : children_) {
    clockid_t clock;
    timespec time;
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &time) != 0) continue;
    seconds += static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  return seconds;
}

void WorkerTeam::Member::Barrier() {
  Page& page = *team_.page_;
  const uint32_t word = page.barrier.load(std::memory_order_acquire);
  if (page.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
    page.arrived.store(0, std::memory_order_relaxed);
    FutexBump(page.barrier);
    return;
  }
  const double start = MonotonicSeconds();
  while (page.barrier.load(std::memory_order_acquire) == word) {
    FutexWait(page.barrier, word, kSlice);
    if (MonotonicSeconds() - start > kBarrierSeconds) _exit(1);
  }
}

}  // namespace shardmesh::bench
