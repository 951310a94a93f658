#include "core/base/incarnation.h"

#include <gtest/gtest.h>

#include <limits>

namespace shardmesh {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(Incarnation, IsTheWallTime_OrOneMoreThanTheLastWhenTheClockWentBack) {
  const absl::Time wall = absl::FromUnixNanos(1'000'000);
  EXPECT_EQ(NextIncarnation(wall, 0), 1'000'000);
  EXPECT_EQ(NextIncarnation(wall, 999'999), 1'000'000);
  EXPECT_EQ(NextIncarnation(wall, 1'000'000), 1'000'001);
  EXPECT_EQ(NextIncarnation(wall, 5'000'000), 5'000'001);
}

TEST(Incarnation, ClockOfAnyTime_GivesAPositiveNumberThatMayBeAskedFor) {
  EXPECT_EQ(NextIncarnation(absl::UnixEpoch(), 0), 1);
  EXPECT_EQ(NextIncarnation(absl::UnixEpoch() - absl::Hours(1), 0), 1);
  EXPECT_EQ(NextIncarnation(absl::InfinitePast(), 7), 8);
  EXPECT_EQ(NextIncarnation(absl::InfiniteFuture(), 7), kMaxIncarnation);
  EXPECT_EQ(NextIncarnation(absl::UnixEpoch(), kMost), kMost);
}

TEST(Incarnation, RefusalSaysWhichOneWouldBeTaken) {
  const absl::Status refused = WithNextIncarnation(absl::AbortedError("stale"), 43);
  EXPECT_EQ(refused.message(), "stale");
  EXPECT_EQ(NextIncarnationOf(refused), 43);
  EXPECT_EQ(NextIncarnationOf(absl::AbortedError("stale")), std::nullopt);
  EXPECT_EQ(NextIncarnationOf(WithNextIncarnation(absl::OkStatus(), 43)), std::nullopt);
  absl::Status garbage = absl::AbortedError("stale");
  for (const char* const text : {"", "-1", "0", "x", "99999999999999999999"}) {
    garbage.SetPayload(kNextIncarnationKey, absl::Cord(text));
    EXPECT_EQ(NextIncarnationOf(garbage), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace shardmesh
