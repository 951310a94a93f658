// Trace: what one worker did for one job, and when: spans in a ring that is allocated once and holds the newest ones.
// Always on: a span costs two looks at the clock and an uncontended lock, for each range of 2^20 elements. Times are
// MonotonicNanos (local/memory/futex.h), which all processes of a host share. Thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/sync.h"

namespace shardmesh {

struct TraceSpan {
  const char* name = "";  // a literal
  int64_t step = 0;
  int32_t bucket = -1;  // of a range; -1: no range
  int32_t item = -1;    // the number of the range, or of the slot; -1: neither
  int32_t thread = 0;   // as the kernel numbers them
  int64_t begin_nanos = 0;
  int64_t end_nanos = 0;  // at an instant: begin_nanos
};

class Trace {
 public:
  static constexpr int kMaxSpans = 4096;

  Trace() : spans_(kMaxSpans) {}

  // Sets the span's thread. No allocation.
  void Add(TraceSpan span);
  // Oldest first.
  std::vector<TraceSpan> Spans() const;

 private:
  mutable Mutex mu_;
  std::vector<TraceSpan> spans_ ABSL_GUARDED_BY(mu_);
  uint64_t added_ ABSL_GUARDED_BY(mu_) = 0;
};

// Adds a span from its construction to its end. `trace` may be null: then there is none.
class ScopedSpan {
 public:
  ScopedSpan(Trace* trace, const char* name, int64_t step, int32_t bucket = -1, int32_t item = -1);
  ~ScopedSpan();
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  Trace* const trace_;
  TraceSpan span_;
};

}  // namespace shardmesh
