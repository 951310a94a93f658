#include "bench/imbalance/imbalance_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace shardmesh::bench {
namespace {

constexpr int kRanks = 4, kMinibatch = 8, kTrials = 50;

std::vector<int> Sorted(const Parts& parts) {
  std::vector<int> samples;
  for (const std::vector<int>& part : parts) samples.insert(samples.end(), part.begin(), part.end());
  std::sort(samples.begin(), samples.end());
  return samples;
}

std::vector<int> UpTo(int n) {
  std::vector<int> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::vector<double> SumsOf(const Parts& parts, const std::vector<double>& costs) {
  std::vector<double> sums;
  for (const std::vector<int>& part : parts) {
    sums.push_back(std::accumulate(part.begin(), part.end(), 0.0, [&](double sum, int s) { return sum + costs[s]; }));
  }
  std::sort(sums.begin(), sums.end(), std::greater<>());
  return sums;
}

// The textbook's: differencing alone ends with 16 and 14, a swap of 8 and 7 mends it.
TEST(Partition, KnownNumbers_TwoEqualParts) {
  const std::vector<double> costs = {8, 7, 6, 5, 4};
  const Parts parts = Partition(costs, 2, false);
  EXPECT_EQ(Sorted(parts), UpTo(5));
  EXPECT_EQ(SumsOf(parts, costs), (std::vector<double>{15, 15}));
}

TEST(Partition, EqualCounts_PairsLongWithShort) {
  const std::vector<double> costs = {8, 7, 2, 1};
  EXPECT_EQ(SumsOf(Partition(costs, 2, true), costs), (std::vector<double>{9, 9}));
  const std::vector<double> skewed = {9, 1, 1, 1};
  EXPECT_EQ(SumsOf(Partition(skewed, 2, true), skewed), (std::vector<double>{10, 2}));
  EXPECT_EQ(SumsOf(Partition(skewed, 2, false), skewed), (std::vector<double>{9, 3}));
}

TEST(Partition, AsManyPartsAsSamples_OneEach) {
  const std::vector<double> costs = {5, 5, 1, 9};
  for (const bool equal_counts : {false, true}) {
    EXPECT_EQ(SumsOf(Partition(costs, 4, equal_counts), costs), (std::vector<double>{9, 5, 5, 1}));
  }
  EXPECT_EQ(Partition({}, 2, false), Parts(2));
}

TEST(PlanMicro, DrawnLengths_EqualCountsAndMicrobatchesWithinTheLimit) {
  for (uint64_t seed = 0; seed < kTrials; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<int64_t> lengths = SampleLengths(kRanks * kMinibatch, seed);
    const std::vector<double> costs = CostsOf(lengths);
    const std::vector<Parts> plan = PlanMicro(lengths, kRanks);
    ASSERT_EQ(plan.size(), kRanks);
    Parts all;
    for (const Parts& of_rank : plan) {
      EXPECT_EQ(of_rank.size(), plan[0].size());
      EXPECT_EQ(Sorted(of_rank).size(), kMinibatch);
      double last = 1e9;
      for (const std::vector<int>& microbatch : of_rank) {
        int64_t tokens = 0;
        for (const int s : microbatch) tokens += lengths[s];
        EXPECT_LE(tokens, kLongestSample);
        const double cost = SumsOf({microbatch}, costs)[0];
        EXPECT_LE(cost, last);
        last = cost;
        all.push_back(microbatch);
      }
    }
    EXPECT_EQ(Sorted(all), UpTo(kRanks * kMinibatch));
  }
}

TEST(PlanMicro, SamplesOfTheLimit_OneInEachMicrobatch) {
  const std::vector<int64_t> lengths(kRanks * 2, kLongestSample);
  for (const Parts& of_rank : PlanMicro(lengths, kRanks)) EXPECT_EQ(of_rank.size(), 2);
  const std::vector<int64_t> halves(kRanks * 2, kLongestSample / 2);
  for (const Parts& of_rank : PlanMicro(halves, kRanks)) EXPECT_EQ(of_rank.size(), 1);
}

TEST(PlanMini, DrawnLengths_EverySampleOnceAndNoWorseThanEqualCounts) {
  const std::vector<double> even(kRanks, 1);
  for (uint64_t seed = 0; seed < kTrials; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<int64_t> lengths = SampleLengths(kRanks * kMinibatch, seed);
    const std::vector<double> costs = CostsOf(lengths);
    const Parts plan = PlanMini(lengths, kRanks);
    EXPECT_EQ(Sorted(plan), UpTo(kRanks * kMinibatch));
    const double time = TimeOfMini(plan, costs, even);
    EXPECT_LE(time, TimeOfMini(Partition(costs, kRanks, true), costs, even));
    EXPECT_LE(time, TimeOfMicro(PlanMicro(lengths, kRanks), costs, even));
    EXPECT_GE(time, TimeOfIdeal(costs, even) * (1 - 1e-12));
  }
}

TEST(PullOrder, LongestFirst_EqualOnesInOrder) {
  EXPECT_EQ(PullOrder({300, 900, 300, 1000}), (std::vector<int>{3, 1, 0, 2}));
}

TEST(TimeOf, KnownPlans) {
  const std::vector<double> costs = {6, 4, 2, 2}, even = {1, 1}, skewed = {1, 2};
  const std::vector<Parts> micro = {{{0}, {2}}, {{1}, {3}}};
  EXPECT_EQ(TimeOfMicro(micro, costs, even), 8);    // 6, then 2
  EXPECT_EQ(TimeOfMicro(micro, costs, skewed), 8);  // the slow rank has the heavy ones
  const Parts mini = {{0}, {1, 2, 3}};
  EXPECT_EQ(TimeOfMini(mini, costs, even), 8);
  EXPECT_EQ(TimeOfMini(mini, costs, skewed), 6);
  EXPECT_EQ(TimeOfPulling({0, 1, 2, 3}, costs, even), 8);    // 6 + 2 and 4 + 2
  EXPECT_EQ(TimeOfPulling({0, 1, 2, 3}, costs, skewed), 6);  // rank 0 has the first, rank 1 the rest in 4
  EXPECT_EQ(TimeOfIdeal(costs, even), 7);
  EXPECT_EQ(TimeOfIdeal({9, 1}, even), 9);
}

TEST(CostOf, Fit_OfThirtyTwoThousandTokens) {
  EXPECT_DOUBLE_EQ(CostOf(32'000), 1.982 + 2.612);
  EXPECT_DOUBLE_EQ(CostOf(16'000), 1.982 / 4 + 2.612 / 2);
  EXPECT_EQ(CostsOf({0, 32'000}), (std::vector<double>{0, CostOf(32'000)}));
}

TEST(SampleLengths, ManyDrawn_MeanAndQuantilesOfTheTruncatedLaw) {
  std::vector<int64_t> lengths = SampleLengths(100'000, 1);
  EXPECT_EQ(lengths, SampleLengths(100'000, 1));
  std::sort(lengths.begin(), lengths.end());
  EXPECT_GE(lengths.front(), kShortestSample);
  EXPECT_LE(lengths.back(), kLongestSample);
  EXPECT_NEAR(static_cast<double>(lengths[50'000]), 11'900, 200);
  EXPECT_NEAR(std::accumulate(lengths.begin(), lengths.end(), 0.0) / 100'000, 16'300, 200);
}

TEST(RankSpeeds, Spread_NoRankBelowOne) {
  EXPECT_EQ(RankSpeeds(3, 0, 7), (std::vector<double>{1, 1, 1}));
  const std::vector<double> speeds = RankSpeeds(10'000, 0.15, 7);
  EXPECT_GE(*std::min_element(speeds.begin(), speeds.end()), 1);
  EXPECT_NEAR(std::accumulate(speeds.begin(), speeds.end(), 0.0) / 10'000, 1 + 0.15 * 0.798, 0.005);
}

}  // namespace
}  // namespace shardmesh::bench
