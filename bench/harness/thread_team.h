// ThreadTeam: threads that are kept from one task to the next, as OpenMP keeps its own; for benchmarks of several
// threads. Between tasks they look for work for a millisecond, then they sleep. For one thread of the caller.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace shardmesh::bench {

class ThreadTeam {
 public:
  using Work = absl::FunctionRef<void(int rank)>;

  // REQUIRES: size >= 1.
  explicit ThreadTeam(int size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls work(rank) for every rank below size(), rank 0 in this thread, and returns when all are done.
  void Run(Work work);

 private:
  void Loop(int rank);

  const Work* work_ = nullptr;  // null: the threads end
  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<int> working_{0};
  std::vector<std::thread> threads_;
};

}  // namespace shardmesh::bench
