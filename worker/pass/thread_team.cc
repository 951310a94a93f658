#include "worker/pass/thread_team.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "core/base/thread.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kCheck = absl::Seconds(1);  // waits end and begin again this often
}  // namespace

ThreadTeam::ThreadTeam(int threads) {
  for (int i = 1; i < threads; ++i) {
    absl::StatusOr<std::thread> thread = StartThread("a team", [this] { Loop(); });
    if (!thread.ok()) {
      spdlog::warn("event=team_is_small threads={} of={} error=\"{}\"", i, threads, thread.status().ToString());
      return;
    }
    threads_.push_back(*std::move(thread));
  }
}

ThreadTeam::~ThreadTeam() {
  {
    MutexLock lock(mu_);
    stop_ = true;
  }
  changed_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::WorkThrough(int num_items, void* context, Call call) {
  for (int i = next_.fetch_add(1); i < num_items; i = next_.fetch_add(1)) call(context, i);
}

void ThreadTeam::Run(int num_items, void* context, Call call) {
  next_.store(0);
  if (threads_.empty() || num_items < 2) {
    WorkThrough(num_items, context, call);
    return;
  }
  {
    MutexLock lock(mu_);
    num_items_ = num_items;
    context_ = context;
    call_ = call;
    working_ = static_cast<int>(threads_.size());
    ++round_;
  }
  changed_.SignalAll();
  WorkThrough(num_items, context, call);
  MutexLock lock(mu_);
  while (working_ > 0) changed_.WaitFor(mu_, kCheck);
}

void ThreadTeam::Loop() {
  uint64_t seen = 0;
  while (true) {
    int num_items;
    void* context;
    Call call;
    {
      MutexLock lock(mu_);
      while (round_ == seen && !stop_) changed_.WaitFor(mu_, kCheck);
      if (stop_) return;
      seen = round_;
      num_items = num_items_;
      context = context_;
      call = call_;
    }
    WorkThrough(num_items, context, call);
    bool last;
    {
      MutexLock lock(mu_);
      last = --working_ == 0;
    }
    if (last) changed_.SignalAll();
  }
}

}  // namespace shardmesh
