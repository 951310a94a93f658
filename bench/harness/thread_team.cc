#include "bench/harness/thread_team.h"

#include "absl/time/time.h"
#include "bench/harness/harness.h"
#include "local/memory/futex.h"

namespace shardmesh::bench {
namespace {

constexpr double kLookSeconds = 1e-3;
constexpr absl::Duration kSlice = absl::Milliseconds(200);

// Until `turn` is another than `seen`.
void Await(std::atomic<uint32_t>& turn, uint32_t seen) {
  const double start = MonotonicSeconds();
  while (turn.load(std::memory_order_acquire) == seen) {
    if (MonotonicSeconds() - start > kLookSeconds) FutexWait(turn, seen, kSlice);
  }
}

}  // namespace

ThreadTeam::ThreadTeam(int size) {
  for (int rank = 1; rank < size; ++rank) threads_.emplace_back([this, rank] { Loop(rank); });
}

ThreadTeam::~ThreadTeam() {
  work_ = nullptr;
  FutexBump(turn_);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::Run(Work work) {
  if (threads_.empty()) return work(0);
  work_ = &work;
  working_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
  FutexBump(turn_);
  work(0);
  while (working_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

void ThreadTeam::Loop(int rank) {
  for (uint32_t seen = 0;; ++seen) {
    Await(turn_, seen);
    if (work_ == nullptr) return;
    (*work_)(rank);
    working_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace shardmesh::bench
