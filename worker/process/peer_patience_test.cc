#include "worker/process/peer_patience.h"

#include <gtest/gtest.h>

namespace shardmesh {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(4);
constexpr int64_t kSecond = 1'000'000'000, kStart = 100 * kSecond;

bool IsPatient(PeerPatience& patience, int64_t now) {
  const absl::Duration allowed = patience.At(now, kTimeout);
  EXPECT_TRUE(allowed == kTimeout || allowed > absl::Minutes(30)) << allowed;
  return allowed != kTimeout;
}

TEST(PeerPatience, LooksThatAreOnTime_AllowTheTimeout) {
  PeerPatience patience(kStart);
  for (int64_t now = kStart; now < kStart + 20 * kSecond; now += kSecond) EXPECT_FALSE(IsPatient(patience, now));
  EXPECT_FALSE(IsPatient(patience, kStart + (19 + 2) * kSecond)) << "half of a time-out is no gap";
}

// Who runs again first looks several times before the others do.
TEST(PeerPatience, AfterAGap_NobodyIsDeadForAWholeTimeout) {
  PeerPatience patience(kStart);
  EXPECT_FALSE(IsPatient(patience, kStart + kSecond));
  const int64_t again = kStart + 11 * kSecond;
  for (int64_t now = again; now < again + 4 * kSecond; now += kSecond / 2) EXPECT_TRUE(IsPatient(patience, now)) << now;
  for (int64_t now = again + 4 * kSecond; now < again + 9 * kSecond; now += kSecond / 2) {
    EXPECT_FALSE(IsPatient(patience, now)) << now;
  }
}

TEST(PeerPatience, AnotherGapMeanwhile_BeginsATimeoutAnew) {
  PeerPatience patience(kStart);
  const int64_t second_gap = kStart + 10 * kSecond + 2 * kSecond + 1;
  EXPECT_TRUE(IsPatient(patience, kStart + 10 * kSecond));
  EXPECT_TRUE(IsPatient(patience, second_gap));
  for (int second = 1; second < 4; ++second) EXPECT_TRUE(IsPatient(patience, second_gap + second * kSecond));
  EXPECT_FALSE(IsPatient(patience, second_gap + 4 * kSecond));
}

}  // namespace
}  // namespace shardmesh
