// ThreadTeam: a fixed number of threads that work through a list of independent items. ForEach is for one caller at a
// time; the caller works too, so a team of one has no threads of its own. No allocation in ForEach.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "core/base/sync.h"

namespace shardmesh {

class ThreadTeam {
 public:
  // `threads` >= 1, the caller counted in. It has fewer, and says so in the log, when the system gives no more.
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Calls item(i) for every i in [0, num_items), each once, on any thread; returns when all are done.
  template <typename Item>
  void ForEach(int num_items, Item item) {
    Run(num_items, &item, [](void* context, int i) { (*static_cast<Item*>(context))(i); });
  }

 private:
  using Call = void (*)(void* context, int item);
  void Run(int num_items, void* context, Call call);
  void WorkThrough(int num_items, void* context, Call call);
  void Loop();

  std::vector<std::thread> threads_;
  std::atomic<int> next_{0};
  Mutex mu_;
  CondVar changed_;
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 0;
  int working_ ABSL_GUARDED_BY(mu_) = 0;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  int num_items_ ABSL_GUARDED_BY(mu_) = 0;
  void* context_ ABSL_GUARDED_BY(mu_) = nullptr;
  Call call_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace shardmesh
