// How long training stood still. Pauses: by what was done to it, and the table of that; thread-compatible. Commits:
// from one commit to the next, as they are seen; thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/base/sync.h"

namespace shardmesh::testing {

class Pauses {
 public:
  void Add(const std::string& cause, absl::Duration pause) { by_cause_[cause].push_back(pause); }
  // A row for each cause, in the order of their names: how often, the median, the 95th percentile and the worst.
  std::string Table() const;

 private:
  std::map<std::string, std::vector<absl::Duration>> by_cause_;
};

class Commits {
 public:
  struct Gap {
    absl::Time begin;
    absl::Duration length;
  };

  // Of steps that were seen before nothing is noted.
  void See(int64_t step);
  int64_t newest() const { return newest_.load(); }
  // Forgets the gaps before.
  void WatchGaps();
  // The longest that ended since WatchGaps.
  Gap LongestGap() const;

 private:
  std::atomic<int64_t> newest_{0};
  mutable Mutex mu_;
  absl::Time seen_ ABSL_GUARDED_BY(mu_);
  Gap longest_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh::testing
