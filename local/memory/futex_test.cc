#include "local/memory/futex.h"

#include <thread>

#include "core/base/matchers.h"
#include "local/process/host_id.h"

namespace shardmesh {
namespace {

TEST(FutexTest, BumpWakesAWaiter) {
  std::atomic<uint32_t> word{0};
  std::thread waiter([&] {
    while (word.load() == 0) FutexWait(word, 0, absl::Seconds(10));
  });
  FutexBump(word);
  waiter.join();
  EXPECT_EQ(word.load(), 1u);
}

TEST(FutexTest, OtherValueOrTimeLimit_Returns) {
  std::atomic<uint32_t> word{5};
  const int64_t start = MonotonicNanos();
  FutexWait(word, 4, absl::Seconds(100));
  FutexWait(word, 5, absl::Milliseconds(1));
  FutexWait(word, 5, absl::Seconds(-1));
  EXPECT_LT(MonotonicNanos() - start, 50'000'000'000);
}

TEST(FutexTest, AwaitChange_SpinsAndThenSleeps) {
  std::atomic<uint32_t> word{5};
  const int64_t start = MonotonicNanos();
  AwaitChange(word, 4, absl::Seconds(100), absl::Seconds(100));  // changed before
  EXPECT_LT(MonotonicNanos() - start, 50'000'000'000);
  for (const absl::Duration spin : {absl::ZeroDuration(), absl::Milliseconds(1), absl::Seconds(100)}) {
    const int64_t before = MonotonicNanos();
    AwaitChange(word, 5, spin, absl::Milliseconds(3));
    EXPECT_GE(MonotonicNanos() - before, spin == absl::ZeroDuration() ? 0 : 1'000'000);
    EXPECT_LT(MonotonicNanos() - before, 50'000'000'000);
  }
  for (const absl::Duration spin : {absl::ZeroDuration(), absl::Seconds(100)}) {
    const uint32_t seen = word.load();
    std::thread waiter([&] {
      while (word.load() == seen) AwaitChange(word, seen, spin, absl::Seconds(100));
    });
    FutexBump(word);
    waiter.join();
  }
}

TEST(HostIdTest, StableInOneProcess) {
  ASSERT_OK_AND_ASSIGN(std::string a, HostId());
  ASSERT_OK_AND_ASSIGN(std::string b, HostId());
  EXPECT_EQ(a, b);
  EXPECT_GT(a.size(), 36u);
}

}  // namespace
}  // namespace shardmesh
