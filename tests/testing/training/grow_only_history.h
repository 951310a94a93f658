// GrowOnlyHistory: what a writer and readers of a register whose values only grow did and when, and whether that is
// linearizable. Thread-safe.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/sync.h"
#include "local/memory/futex.h"

namespace shardmesh::testing {

class GrowOnlyHistory {
 public:
  void WriteBegins(int64_t step) {
    MutexLock lock(mu_);
    begun_[step] = MonotonicNanos();
  }
  // `published`: it found a publication.
  void WriteEnds(int64_t step, bool published) {
    MutexLock lock(mu_);
    if (published) ended_.push_back({step, MonotonicNanos()});
  }
  void Read(int64_t begin, int64_t end, int64_t step, const std::string& by) {
    MutexLock lock(mu_);
    reads_.push_back({begin, end, step, by});
  }
  size_t reads() {
    MutexLock lock(mu_);
    return reads_.size();
  }

  // With one writer of growing values a history is linearizable if and only if no read returns a value before its
  // write began, none an older one than the last that was written before the read began, and none an older one than a
  // read that ended before this one began.
  absl::Status Check() {
    MutexLock lock(mu_);
    std::vector<std::pair<int64_t, int64_t>> floors;  // (from when on, no read may be older than)
    for (const auto& [step, end] : ended_) floors.emplace_back(end, step);
    for (const OneRead& read : reads_) floors.emplace_back(read.end, read.step);
    std::sort(floors.begin(), floors.end());
    std::vector<int64_t> newest;
    for (const auto& floor : floors) newest.push_back(std::max(floor.second, newest.empty() ? -1 : newest.back()));
    for (const OneRead& read : reads_) {
      const auto begun = begun_.find(read.step);
      if (read.step > 0 && (begun == begun_.end() || begun->second > read.end)) {
        return absl::DataLossError(absl::StrCat(read.by, " saw version ", read.step, " before it was written"));
      }
    }
    for (const OneRead& read : reads_) {
      const auto after = std::lower_bound(floors.begin(), floors.end(), std::make_pair(read.begin, int64_t{-1}));
      const int64_t floor = after == floors.begin() ? -1 : newest[after - floors.begin() - 1];
      if (read.step < floor) {
        return absl::DataLossError(absl::StrCat(read.by, " saw version ", read.step, " as the newest, when ", floor,
                                                " had been seen or committed ", read.begin, " ns"));
      }
    }
    return absl::OkStatus();
  }

 private:
  struct OneRead {
    int64_t begin, end, step;
    std::string by;
  };
  Mutex mu_;
  std::map<int64_t, int64_t> begun_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<int64_t, int64_t>> ended_ ABSL_GUARDED_BY(mu_);
  std::vector<OneRead> reads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh::testing
