// Waiters: calls of one job that wait for something (a commit, a version, a digest) without holding a thread.
// Thread-safe. Nothing is called with the lock held, so a waiter may add or remove others.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/base/sync.h"

namespace shardmesh {

class Waiter {
 public:
  virtual ~Waiter() = default;
  // Called after every change, and a few times per heartbeat time-out. True: it is answered, forget it. It may be
  // called by several threads at once, and once more after it returned true.
  virtual bool Try() = 0;
};

class Waiters {
 public:
  // Tries it at once, and keeps it until it is answered.
  void Add(std::shared_ptr<Waiter> waiter);
  // Forgets it, answered or not: whoever closed the job tries nobody any more.
  void Remove(const Waiter* waiter);
  // Tries all.
  void Notify();

 private:
  Mutex mu_;
  std::vector<std::shared_ptr<Waiter>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
