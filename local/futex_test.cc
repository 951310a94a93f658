#include "local/futex.h"

#include <thread>

#include "core/matchers.h"
#include "local/host_id.h"

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

TEST(HostIdTest, StableInOneProcess) {
  ASSERT_OK_AND_ASSIGN(std::string a, HostId());
  ASSERT_OK_AND_ASSIGN(std::string b, HostId());
  EXPECT_EQ(a, b);
  EXPECT_GT(a.size(), 36u);
}

}  // namespace
}  // namespace shardmesh
