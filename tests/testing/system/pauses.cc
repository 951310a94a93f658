#include "tests/testing/system/pauses.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/clock.h"

namespace shardmesh::testing {

std::string Pauses::Table() const {
  std::string table = absl::StrFormat("%-30s %5s %11s %11s %11s\n", "", "times", "median", "95 %", "worst");
  for (auto [cause, pauses] : by_cause_) {
    std::sort(pauses.begin(), pauses.end());
    const auto at = [&pauses = pauses](double part) {
      return absl::ToDoubleMilliseconds(pauses[static_cast<size_t>(part * static_cast<double>(pauses.size() - 1))]);
    };
    absl::StrAppendFormat(&table, "%-30s %5d %8.0f ms %8.0f ms %8.0f ms\n", cause, pauses.size(), at(0.5), at(0.95),
                          at(1));
  }
  return table;
}

void Commits::See(int64_t step) {
  MutexLock lock(mu_);
  if (step <= newest()) return;
  const absl::Time now = MonotonicNow();
  if (now - seen_ > longest_.length) longest_ = {seen_, now - seen_};
  seen_ = now;
  newest_.store(step);
}

void Commits::WatchGaps() {
  MutexLock lock(mu_);
  if (newest() == 0) seen_ = MonotonicNow();
  longest_ = {seen_, absl::ZeroDuration()};
}

Commits::Gap Commits::LongestGap() const {
  MutexLock lock(mu_);
  return longest_;
}

}  // namespace shardmesh::testing
