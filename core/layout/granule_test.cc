#include "core/layout/granule.h"

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

GranuleCut Cut(std::vector<int64_t> shape, const char* granule) {
  return *CutIntoGranules(shape, *ParseGranule(granule));
}

TEST(Granule, TextRoundTrips) {
  for (const char* text : {"flat:256", "flat:16384", "rows:1", "rows:32", "block:128", "whole"}) {
    ASSERT_OK(ParseGranule(text));
    EXPECT_EQ(ParseGranule(text)->ToString(), text);
  }
}

TEST(Granule, BadText_InvalidArgumentNamesItAndTheForms) {
  for (const char* text : {"", "flat", "flat:", "flat:0", "flat:100", "flat:-64", "rows:0", "block:12", "block:131072",
                           "whole:1", "tiles:3", "flat:99999999999999999999", "rows:4294967297"}) {
    EXPECT_THAT(ParseGranule(text), StatusIs(Code::kInvalidArgument, HasSubstr("block:N"))) << text;
  }
}

TEST(Cut, Flat) {
  const GranuleCut cut = Cut({3, 171}, "flat:256");
  EXPECT_EQ(cut.granule_elements, 256);
  EXPECT_EQ(cut.num_granules, 3);
  EXPECT_EQ(cut.num_elements, 513);
  EXPECT_FALSE(cut.owned);
  EXPECT_EQ(Cut({}, "flat:256").padded_elements(), 256);
}

TEST(Cut, Rows_GrowUntilAGranuleIsWholeGroupsOfDraws) {
  EXPECT_EQ(Cut({10, 128}, "rows:1").granule_elements, 128);
  EXPECT_EQ(Cut({10, 128}, "rows:1").num_granules, 10);
  EXPECT_EQ(Cut({10, 100}, "rows:1").granule_elements, 1600);  // 16 rows
  EXPECT_EQ(Cut({10, 100}, "rows:1").num_granules, 1);
  EXPECT_EQ(Cut({4, 10, 64}, "rows:3").num_granules, 14);  // 40 rows in groups of 3
}

TEST(Cut, Block_FillsUpTheEdges) {
  const GranuleCut cut = Cut({2, 576, 7168}, "block:128");
  EXPECT_EQ(cut.granule_elements, 128 * 128);
  EXPECT_EQ(cut.num_granules, 2 * 5 * 56);
  EXPECT_EQ(cut.num_elements, 2 * 576 * 7168);
}

TEST(Cut, Whole_OneMatrixIsOwned_AStackIsCutBetweenMatrices) {
  EXPECT_TRUE(Cut({30, 40}, "whole").owned);
  EXPECT_EQ(Cut({30, 40}, "whole").num_granules, 1);
  EXPECT_EQ(Cut({30, 40}, "whole").granule_elements, 1280);
  EXPECT_EQ(Cut({37, 53}, "whole").padded_elements(), 2048) << "not 64 of them";
  const GranuleCut stack = Cut({8, 32, 64}, "whole");
  EXPECT_FALSE(stack.owned);
  EXPECT_EQ(stack.granule_elements, 32 * 64);
  EXPECT_EQ(stack.num_granules, 8);
}

TEST(Cut, NoElements_NoGranules) {
  for (const char* granule : {"flat:256", "rows:1", "block:128", "whole"}) {
    EXPECT_EQ(Cut({0, 64}, granule).num_granules, 0) << granule;
    EXPECT_EQ(Cut({64, 0}, granule).padded_elements(), 0) << granule;
  }
}

TEST(Cut, FewerThanTwoDimensions_InvalidArgumentSaysWhatFits) {
  for (const char* granule : {"rows:1", "block:128", "whole"}) {
    EXPECT_THAT(CutIntoGranules({64}, *ParseGranule(granule)), StatusIs(Code::kInvalidArgument, HasSubstr("flat:256")));
  }
}

TEST(Cut, SizesBeyondTheLimits) {
  constexpr int64_t kLarge = int64_t{1} << 40;
  EXPECT_EQ(Cut({kLarge}, "flat:256").num_granules, kLarge / 256);
  EXPECT_THAT(CutIntoGranules({kLarge + 1}, Granule()), StatusIs(Code::kResourceExhausted, HasSubstr("1099511627776")));
  EXPECT_THAT(CutIntoGranules({kLarge, kLarge, kLarge}, Granule()),
              StatusIs(Code::kResourceExhausted, HasSubstr("split")));
  EXPECT_EQ(Cut({kLarge, kLarge, 0}, "flat:256").num_elements, 0);
  EXPECT_THAT(CutIntoGranules({-1}, Granule()), StatusIs(Code::kInvalidArgument, HasSubstr("-1")));
  EXPECT_THAT(CutIntoGranules({1, 1, 1, 1, 1, 1, 1, 1, 1}, Granule()),
              StatusIs(Code::kInvalidArgument, HasSubstr("9 dim")));
  EXPECT_THAT(CutIntoGranules({1, kLarge}, *ParseGranule("rows:4294967296")),
              StatusIs(Code::kInvalidArgument, HasSubstr("rows")));
}

}  // namespace
}  // namespace shardmesh
