#include "bench/harness/harness.h"

#include <gtest/gtest.h>
#include <stdio.h>

#include <nlohmann/json.hpp>

#include "core/base/matchers.h"

namespace shardmesh::bench {
namespace {

TEST(Harness, SpreadOfOddAndEven) {
  const Spread odd = SpreadOf({3, 1, 2});
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.max, 3);
  EXPECT_EQ(SpreadOf({4, 1, 2, 3}).median, 2.5);
  EXPECT_EQ(SpreadOf({7}).median, 7);
}

// The median of the rounds' ratios is not the ratio of the medians: a slow round slows both sides.
TEST(Harness, RatioIsTakenRoundByRound) {
  const std::vector<double> ours = {1, 10, 3}, rival = {2, 20, 9};
  const Row row = Compare("x, ms", ours, rival, 1e3);
  EXPECT_EQ(row.ours, 3000);
  EXPECT_EQ(row.rival, 9000);
  EXPECT_EQ(row.ratio.median, 2);
  EXPECT_EQ(row.ratio.min, 2);
  EXPECT_EQ(row.ratio.max, 3);
  EXPECT_EQ(CompareCost("x", ours, rival, 1).ratio.median, 0.5);
}

TEST(Harness, Goals) {
  EXPECT_TRUE(Goal::AtLeast(2).MetBy(2));
  EXPECT_FALSE(Goal::AtLeast(2).MetBy(1.99));
  EXPECT_TRUE(Goal::AtMost(1.1).MetBy(1.1));
  EXPECT_FALSE(Goal::AtMost(1.1).MetBy(1.11));
  EXPECT_TRUE(Goal().MetBy(0));
  EXPECT_EQ(Goal::AtMost(1.1).ToString(), "<= 1.1");
}

TEST(Harness, RoundsInterleaveAndDropWarmUps) {
  Rounds rounds;
  std::string order;
  double tick = 0;
  for (const char* name : {"a", "b"}) {
    rounds.Add(name, [&order, &tick, name]() -> absl::StatusOr<double> {
      order += name;
      return ++tick;
    });
  }
  ASSERT_OK(rounds.Measure(1, 2));
  EXPECT_EQ(order, "ababab");
  EXPECT_EQ(rounds.seconds("a"), std::vector<double>({3, 5}));
  EXPECT_EQ(rounds.seconds("b"), std::vector<double>({4, 6}));
}

TEST(Harness, AnErrorEndsTheRoundsAndNamesTheContestant) {
  Rounds rounds;
  rounds.Add("broken", []() -> absl::StatusOr<double> { return absl::InternalError("wrong bits"); });
  const absl::Status status = rounds.Measure(0, 3);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "broken: wrong bits");
}

TEST(Harness, JsonRows) {
  Report report("title");
  report.Add(Compare("step, ms", {1, 1, 1}, {2, 3, 4}, 1e3, Goal::AtLeast(2)));
  report.Add(Compare("other, ms", {1}, {2}, 1e3));
  const auto rows = nlohmann::json::parse(report.ToJson());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["name"], "step, ms");
  EXPECT_EQ(rows[0]["ours"], 1000.0);
  EXPECT_EQ(rows[0]["rival"], 3000.0);
  EXPECT_EQ(rows[0]["ratio"], 3.0);
  EXPECT_EQ(rows[0]["min"], 2.0);
  EXPECT_EQ(rows[0]["max"], 4.0);
  EXPECT_EQ(rows[0]["goal"], ">= 2");
  EXPECT_EQ(rows[0]["met"], true);
  EXPECT_TRUE(rows[1]["goal"].is_null());
  EXPECT_TRUE(rows[0].find("missing") == rows[0].end());
  EXPECT_EQ(report.WriteJson("/nowhere/at/all.json").code(), absl::StatusCode::kPermissionDenied);
}

TEST(Harness, ARowWithoutFigures_SaysWhy) {
  Report report("title");
  Row row;
  row.name = "ours / a rival, ms";
  row.goal = Goal::AtLeast(2);
  row.missing = "the rival is not there";
  report.Add(row);
  const auto rows = nlohmann::json::parse(report.ToJson());
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["missing"], "the rival is not there");
  EXPECT_EQ(rows[0]["goal"], ">= 2");
  for (const char* figure : {"ours", "rival", "ratio", "min", "max", "met"}) EXPECT_TRUE(rows[0][figure].is_null());
}

}  // namespace
}  // namespace shardmesh::bench
