#include "worker/transport/late_ranks.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;

TEST(LateRanks, SilentOnes_HoldUp) {
  EXPECT_THAT(WhoHoldsUp(0, {{1, 2}, {}, {}}), ElementsAre(1, 2));
  EXPECT_THAT(WhoHoldsUp(0, {{2}, {2}, {}}), ElementsAre(2));
}

TEST(LateRanks, OnesThatWaitThemselves_DoNot) {
  EXPECT_THAT(WhoHoldsUp(1, {{2}, {0}, {}}), ElementsAre(2));
  EXPECT_THAT(WhoHoldsUp(0, {{1}, {2}, {3}, {}, {}}), ElementsAre(3));
  EXPECT_THAT(WhoHoldsUp(0, {{1, 3}, {0, 3, 4}, {}, {}, {}}), ElementsAre(3, 4));
}

TEST(LateRanks, OnesThatWaitForEachOther_AreThoseThatDidNotComeHere) {
  EXPECT_THAT(WhoHoldsUp(0, {{1}, {0}}), ElementsAre(1));
  EXPECT_THAT(WhoHoldsUp(2, {{1}, {2, 0}, {0, 1}}), ElementsAre(0, 1));
}

}  // namespace
}  // namespace shardmesh
