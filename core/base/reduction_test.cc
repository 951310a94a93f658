#include "core/base/reduction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/format/format.h"

namespace shardmesh {
namespace {

// A number that remembers how it was added, so that the shape itself is compared.
struct Term {
  std::string text;
};
Term operator+(const Term& a, const Term& b) { return {"(" + a.text + "+" + b.text + ")"}; }

// The definition: a complete tree over `width` leaves, of which those from `size` on do not exist.
template <class Number>
std::optional<Number> Oracle(const std::vector<Number>& slots, size_t first, size_t width) {
  if (width == 1) return first < slots.size() ? std::optional<Number>(slots[first]) : std::nullopt;
  const auto left = Oracle(slots, first, width / 2);
  const auto right = Oracle(slots, first + width / 2, width / 2);
  if (!right) return left;
  return *left + *right;
}

template <class Number>
Number OracleSum(const std::vector<Number>& slots) {
  size_t width = 1;
  while (width < slots.size()) width *= 2;
  return *Oracle(slots, 0, width);
}

std::vector<Term> Terms(int n) {
  std::vector<Term> terms;
  for (int i = 0; i < n; ++i) terms.push_back({std::to_string(i)});
  return terms;
}

template <int... kIndex>
void ExpectFixedShapes(std::integer_sequence<int, kIndex...>) {
  const auto check = [](auto n) {
    constexpr int kLeaves = decltype(n)::value;
    const std::vector<Term> terms = Terms(kLeaves);
    EXPECT_EQ(TreeSumFixed<kLeaves>([&](int i) { return terms[i]; }).text, OracleSum(terms).text);
  };
  (check(std::integral_constant<int, kIndex + 1>()), ...);
}

TEST(ReductionTest, ShapeEqualsTheOracle_1To64Slots) {
  for (int n = 1; n <= 64; ++n) {
    const std::vector<Term> terms = Terms(n);
    EXPECT_EQ(TreeSum<Term>(n, [&](int i) { return terms[i]; }).text, OracleSum(terms).text) << n;
  }
  ExpectFixedShapes(std::make_integer_sequence<int, 64>());
}

TEST(ReductionTest, ExampleOfTheHeader) {
  const std::vector<Term> terms = Terms(5);
  EXPECT_EQ(TreeSum<Term>(5, [&](int i) { return terms[i]; }).text, "(((0+1)+(2+3))+4)");
}

TEST(ReductionTest, BitsEqualTheOracle_RandomFloats) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int n = 1; n <= 64; ++n) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      std::vector<float> slots;
      for (int i = 0; i < n; ++i) slots.push_back(std::ldexp(normal(random), static_cast<int>(random() % 40) - 20));
      ASSERT_EQ(FloatBits(TreeSum<float>(n, [&](int i) { return slots[i]; })), FloatBits(OracleSum(slots))) << n;
    }
  }
}

// A missing leaf that was added as +0 would lose the sign.
TEST(ReductionTest, MissingLeavesAreSkipped_NegativeZeroStays) {
  for (int n : {1, 3, 5, 7, 63}) {
    EXPECT_TRUE(std::signbit(TreeSum<float>(n, [](int) { return -0.0f; }))) << n;
  }
}

// An aligned subtree of slots summed elsewhere gives the same bits.
TEST(ReductionTest, AlignedSubtreesCompose) {
  const std::vector<Term> terms = Terms(11);
  const auto leaf = [&](int i) { return terms[i]; };
  const std::vector<Term> roots = {TreeSum<Term>(4, leaf), TreeSum<Term>(4, [&](int i) { return terms[4 + i]; }),
                                   TreeSum<Term>(3, [&](int i) { return terms[8 + i]; })};
  EXPECT_EQ(TreeSum<Term>(3, [&](int i) { return roots[i]; }).text, TreeSum<Term>(11, leaf).text);
}

}  // namespace
}  // namespace shardmesh
