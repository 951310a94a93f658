#include "worker/control/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "local/memory/futex.h"

namespace shardmesh {

void Trace::Add(TraceSpan span) {
  static thread_local const auto thread = static_cast<int32_t>(syscall(SYS_gettid));
  span.thread = thread;
  MutexLock lock(mu_);
  spans_[added_++ % kMaxSpans] = span;
}

std::vector<TraceSpan> Trace::Spans() const {
  std::vector<TraceSpan> spans;
  spans.reserve(kMaxSpans);  // before those who add have to wait
  MutexLock lock(mu_);
  const uint64_t first = added_ - std::min<uint64_t>(added_, kMaxSpans);
  for (uint64_t i = first; i < added_; ++i) spans.push_back(spans_[i % kMaxSpans]);
  return spans;
}

ScopedSpan::ScopedSpan(Trace* trace, const char* name, int64_t step, int32_t bucket, int32_t item) : trace_(trace) {
  if (trace_ == nullptr) return;
  span_.name = name;
  span_.step = step;
  span_.bucket = bucket;
  span_.item = item;
  span_.begin_nanos = MonotonicNanos();
}

ScopedSpan::~ScopedSpan() {
  if (trace_ == nullptr) return;
  span_.end_nanos = MonotonicNanos();
  trace_->Add(span_);
}

}  // namespace shardmesh
