#include "examples/digits/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/matchers.h"

namespace shardmesh::digits {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ParseSlots, NumbersOrAnError) {
  ASSERT_OK_AND_ASSIGN(const std::vector<Slot> slots, ParseSlots("2,0"));
  EXPECT_THAT(slots, ElementsAre(Slot(2), Slot(0)));
  for (const char* wrong : {"", "0,", ",", "x", "0;1", "9999999999"}) {
    EXPECT_THAT(ParseSlots(wrong), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is no slot; give at least")))
        << wrong;
  }
}

// A reader waits for this version and no later one.
TEST(LastVersion, IsTheLastMultipleThatTrainingReaches) {
  EXPECT_EQ(LastVersion(10, 1), 10);
  EXPECT_EQ(LastVersion(10, 7), 7);
  EXPECT_EQ(LastVersion(14, 7), 14);
  EXPECT_EQ(LastVersion(10, 11), 0);
}

}  // namespace
}  // namespace shardmesh::digits
