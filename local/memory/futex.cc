#include "local/memory/futex.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace shardmesh {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

void FutexWait(std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout) {
  const timespec limit = absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

namespace {
void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}
}  // namespace

void AwaitChange(std::atomic<uint32_t>& word, uint32_t expected, absl::Duration spin, absl::Duration timeout) {
  spin = std::min(spin, timeout);
  if (spin > absl::ZeroDuration()) {
    constexpr int kLooks = 64;  // between two looks at the clock
    const int64_t end = MonotonicNanos() + absl::ToInt64Nanoseconds(spin);
    do {
      for (int i = 0; i < kLooks; ++i) {
        if (word.load(std::memory_order_acquire) != expected) return;
        Pause();
      }
    } while (MonotonicNanos() < end);
    timeout -= spin;
  }
  FutexWait(word, expected, timeout);
}

void FutexBump(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_seq_cst);
  FutexWake(word);
}

void FutexWake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

int64_t MonotonicNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace shardmesh
