#include "core/layout/owner_balance.h"

#include <algorithm>
#include <random>

#include "gtest/gtest.h"

namespace shardmesh {
namespace {

std::vector<double> Loads(const std::vector<OwnedMatrix>& matrices, const std::vector<int32_t>& owners, int64_t n) {
  std::vector<double> loads(n);
  for (size_t i = 0; i < matrices.size(); ++i) loads[owners[i]] += matrices[i].cost;
  return loads;
}

TEST(BalanceOwners, FewerMatricesThanOwners_OneEach) {
  const std::vector<int32_t> owners = BalanceOwners({{5, 1}, {9, 1}, {1, 1}}, 1000);
  EXPECT_EQ(owners, (std::vector<int32_t>{1, 0, 2}));
  EXPECT_TRUE(BalanceOwners({}, 3).empty());
}

TEST(BalanceOwners, ElementsStayBelowTheCapWhereTheyCan) {
  // By cost alone the four large matrices, which cost nothing, would all go to one owner.
  std::vector<OwnedMatrix> matrices(4, {0.001, 1000});
  matrices.push_back({100, 10});
  const std::vector<int32_t> owners = BalanceOwners(matrices, 4);
  std::vector<int64_t> elements(4);
  for (size_t i = 0; i < matrices.size(); ++i) elements[owners[i]] += matrices[i].num_elements;
  EXPECT_LE(*std::max_element(elements.begin(), elements.end()), 1.3 * 4010 / 4);
}

// The bound of the greedy rule on the longest-processing-time order: max <= mean + largest, whatever the numbers.
TEST(BalanceOwners, LoadIsBounded) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    const int64_t n = 1 + static_cast<int64_t>(random() % 40);
    std::vector<OwnedMatrix> matrices(random() % 200);
    double total = 0, largest = 0;
    for (OwnedMatrix& m : matrices) {
      m.cost = NewtonSchulzCost(1 + static_cast<int64_t>(random() % 900), 1 + static_cast<int64_t>(random() % 900));
      m.num_elements = 1;
      total += m.cost;
      largest = std::max(largest, m.cost);
    }
    const std::vector<int32_t> owners = BalanceOwners(matrices, n);
    EXPECT_EQ(owners, BalanceOwners(matrices, n));
    for (const double load : Loads(matrices, owners, n)) {
      // The cap on elements may push a matrix up the list, at most to the end of it.
      EXPECT_LE(load, total / static_cast<double>(n) * 2 + 2 * largest);
    }
  }
}

TEST(NewtonSchulzCost, CountsBothProductsOnTheShortSide) {
  EXPECT_EQ(NewtonSchulzCost(2, 5), 2 * 2 * (2 * 5 + 2));
  EXPECT_EQ(NewtonSchulzCost(5, 2), NewtonSchulzCost(2, 5));
}

}  // namespace
}  // namespace shardmesh
