// Futexes: waiting on a word in shared memory, between processes (see futex(2)). Every wait has a time limit.
// The pattern: read the word, check the condition it guards, wait while the word has that value. Who changes the
// condition increments the word (release) and wakes. Thread-safe; wake-ups may be spurious.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace shardmesh {

// Sleeps while `word` is `expected`, at most `timeout`.
void FutexWait(std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout);

// The same, but first looks at the word for `spin` without giving up the processor: for whoever has one to himself.
void AwaitChange(std::atomic<uint32_t>& word, uint32_t expected, absl::Duration spin, absl::Duration timeout);

// Increments `word` and wakes everybody who waits on it. FutexWake: of a word that was changed otherwise.
void FutexBump(std::atomic<uint32_t>& word);
void FutexWake(std::atomic<uint32_t>& word);

// Nanoseconds of a clock that all processes of the host share and nobody sets.
int64_t MonotonicNanos();

}  // namespace shardmesh
