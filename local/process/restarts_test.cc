#include "local/process/restarts.h"

#include "gtest/gtest.h"

namespace shardmesh {
namespace {

TEST(Restarts, ALongRun_IsFollowedAtOnce) {
  Restarts restarts;
  EXPECT_EQ(restarts.WaitAfter(absl::Seconds(10)), absl::ZeroDuration());
  EXPECT_EQ(restarts.WaitAfter(absl::Hours(100)), absl::ZeroDuration());
}

TEST(Restarts, ShortRuns_AreFollowedLaterAndLater_UntilALongOne) {
  Restarts restarts;
  const double expected[] = {0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5};
  for (const double seconds : expected) {
    EXPECT_EQ(restarts.WaitAfter(absl::Milliseconds(50)), absl::Milliseconds(1000 * seconds)) << seconds;
  }
  EXPECT_EQ(restarts.WaitAfter(absl::Seconds(11)), absl::ZeroDuration());
  EXPECT_EQ(restarts.WaitAfter(absl::ZeroDuration()), absl::Milliseconds(100));
}

TEST(Restarts, Longest_BoundsEachWait) {
  Restarts restarts;
  const double expected[] = {0.1, 0.2, 0.4, 0.5, 0.5};
  for (const double seconds : expected) {
    EXPECT_EQ(restarts.WaitAfter(absl::ZeroDuration(), absl::Milliseconds(500)), absl::Milliseconds(1000 * seconds));
  }
  EXPECT_EQ(restarts.WaitAfter(absl::ZeroDuration()), absl::Seconds(3.2)) << "it is as it would be without";
}

}  // namespace
}  // namespace shardmesh
