#include "kernels/muon/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/cpu/processor.h"

namespace shardmesh {
namespace {

constexpr float kGuard = 12345.0f;
constexpr int64_t kGuards = 64;

// A matrix between guards that nothing may touch, `offset` floats from an aligned address.
struct Guarded {
  Guarded(int64_t size, int offset) : size(size), offset(kGuards + offset), memory(size + 2 * kGuards + 8, kGuard) {}
  float* data() { return memory.data() + offset; }
  std::vector<float> Values() const { return {memory.begin() + offset, memory.begin() + offset + size}; }
  bool GuardsHold() const {
    for (int64_t i = 0; i < static_cast<int64_t>(memory.size()); ++i) {
      if ((i < offset || i >= offset + size) && memory[i] != kGuard) return false;
    }
    return true;
  }
  int64_t size, offset;
  std::vector<float> memory;
};

void FillRandom(Guarded& matrix, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < matrix.size; ++i) matrix.data()[i] = normal(random);
}

struct Shape {
  int64_t rows, columns, depth;
};

// A product with inputs of random numbers and an output of guards.
struct Problem {
  Problem(Shape shape, bool transposed_b, bool with_addend)
      : a(shape.rows * shape.depth, 1),
        b(shape.depth * shape.columns, 3),
        addend(shape.rows * shape.columns, 5),
        out(shape.rows * shape.columns, 7) {
    FillRandom(a, 1);
    FillRandom(b, 2);
    FillRandom(addend, 3);
    gemm.rows = shape.rows;
    gemm.columns = shape.columns;
    gemm.depth = shape.depth;
    gemm.a = a.data();
    gemm.b = b.data();
    gemm.transposed_b = transposed_b;
    gemm.out = out.data();
    gemm.alpha = 0.75f;
    if (!with_addend) return;
    gemm.addend = addend.data();
    gemm.beta = -1.7f;
  }

  // In blocks of at most `largest` rows and columns, the last one first.
  std::vector<float> Run(GemmBlockFn block, int64_t largest = kGemmBlock) {
    std::fill(out.memory.begin(), out.memory.end(), kGuard);
    const auto scratch = std::make_unique<GemmScratch>();
    std::memset(scratch.get(), 0xFF, sizeof(*scratch));  // NaN
    for (int64_t i = (gemm.rows - 1) / largest * largest; i >= 0; i -= largest) {
      for (int64_t j = (gemm.columns - 1) / largest * largest; j >= 0; j -= largest) {
        if (gemm.symmetric && i > j) continue;
        block(gemm, {i, std::min(i + largest, gemm.rows), j, std::min(j + largest, gemm.columns)}, *scratch);
      }
    }
    EXPECT_TRUE(out.GuardsHold());
    return out.Values();
  }

  Guarded a, b, addend, out;
  Gemm gemm;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr Shape kShapes[] = {{1, 1, 1},    {1, 9, 5},    {9, 1, 5},      {5, 6, 0},      {7, 13, 11},
                             {64, 64, 64}, {65, 33, 40}, {130, 257, 65}, {245, 250, 400}};

class GemmTest : public ::testing::TestWithParam<std::tuple<Shape, bool, bool>> {
 protected:
  Problem MakeProblem() const {
    return Problem(std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam()));
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         ::testing::Combine(::testing::ValuesIn(kShapes), ::testing::Bool(), ::testing::Bool()));

TEST_P(GemmTest, Simd_AnyBlocks_SameBitsAsReference) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  Problem problem = MakeProblem();
  const std::vector<float> reference = problem.Run(GemmBlockReference);
  EXPECT_TRUE(SameBits(reference, problem.Run(GemmBlockSimd)));
  EXPECT_TRUE(SameBits(reference, problem.Run(GemmBlockSimd, 37)));
  EXPECT_TRUE(SameBits(reference, problem.Run(GemmBlockSimd, 96)));
}

// Each of the K fused multiply-adds rounds once, a relative 2^-24 of a partial sum that is at most sum |a||b|: in all
// K u sum |a||b| (Higham, "Accuracy and stability of numerical algorithms", 2002, 3.1; 1 + 1e-3 covers the terms of
// second order while K u < 1e-4). The scaled product and the result round once more each.
TEST_P(GemmTest, Reference_Float64Oracle_WithinTheErrorOfItsRoundings) {
  constexpr double kUnit = 1.0 / (1 << 24);
  Problem problem = MakeProblem();
  const Gemm& gemm = problem.gemm;
  const std::vector<float> out = problem.Run(GemmBlockReference);
  for (int64_t i = 0; i < gemm.rows; ++i) {
    for (int64_t j = 0; j < gemm.columns; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < gemm.depth; ++k) {
        const double a = gemm.a[i * gemm.depth + k];
        const double b = gemm.transposed_b ? gemm.b[j * gemm.depth + k] : gemm.b[k * gemm.columns + j];
        sum += a * b;
        magnitude += std::abs(a * b);
      }
      const int64_t at = i * gemm.columns + j;
      const double product = gemm.alpha * sum;
      const double exact = product + (gemm.addend == nullptr ? 0.0 : gemm.beta * double{gemm.addend[at]});
      const double bound =
          1.001 * kUnit *
          (static_cast<double>(gemm.depth) * std::abs(gemm.alpha) * magnitude + std::abs(product) + std::abs(exact));
      ASSERT_NEAR(out[at], exact, bound) << i << ", " << j;
    }
  }
}

float Dot3(GemmBlockFn block, const float (&a)[3], const float (&b)[3]) {
  const auto scratch = std::make_unique<GemmScratch>();
  float out = 0;
  Gemm gemm;
  gemm.rows = gemm.columns = 1;
  gemm.depth = 3;
  gemm.a = a;
  gemm.b = b;
  gemm.out = &out;
  block(gemm, {0, 1, 0, 1}, *scratch);
  return out;
}

TEST(Gemm, OneOutput_OrderOfTheDepth_IsAscendingAndFused) {
  for (const GemmBlockFn block : {GemmBlockReference, SimdSupported() ? GemmBlockSimd : GemmBlockReference}) {
    // 2^24 + 1 is no float: 1 is lost where it is added to 2^24, and kept where it comes last.
    const float big = std::ldexp(1.0f, 24);
    EXPECT_EQ(Dot3(block, {1, 1, -1}, {big, 1, big}), 0);
    EXPECT_EQ(Dot3(block, {1, -1, 1}, {big, big, 1}), 1);
    // (1 + u)^2 = 1 + 2 u + u^2 is no float: u^2 is lost where the product is rounded by itself.
    const float u = std::ldexp(1.0f, -12);
    EXPECT_EQ(Dot3(block, {1, 1 + u, 0}, {-(1 + 2 * u), 1 + u, 0}), u * u);
  }
}

TEST(Gemm, Symmetric_HalfComputed_SameBitsAsAll) {
  for (const int64_t n : {1, 7, 65, 241, 500}) {
    Problem problem({n, n, 33}, /*transposed_b=*/true, /*with_addend=*/true);
    problem.gemm.b = problem.gemm.a;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) problem.addend.data()[i * n + j] = problem.addend.data()[j * n + i];
    }
    const std::vector<float> whole = problem.Run(GemmBlockReference);
    problem.gemm.symmetric = true;
    EXPECT_TRUE(SameBits(whole, problem.Run(GemmBlockReference, 60))) << n;
    if (!SimdSupported()) continue;
    EXPECT_TRUE(SameBits(whole, problem.Run(GemmBlockSimd))) << n;
    EXPECT_TRUE(SameBits(whole, problem.Run(GemmBlockSimd, 60))) << n;
  }
}

TEST(Gemm, Blocks_AnyShape_EachOutputOnce) {
  for (const bool symmetric : {false, true}) {
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {240, 241}, {961, 500}, {723, 723}}) {
      if (symmetric && rows != columns) continue;
      Gemm gemm;
      gemm.rows = rows;
      gemm.columns = columns;
      gemm.symmetric = symmetric;
      std::vector<int> written(rows * columns);
      for (int64_t b = 0; b < NumGemmBlocks(gemm); ++b) {
        const GemmBlock block = GemmBlockAt(gemm, b);
        ASSERT_LE(block.row_end - block.row_begin, kGemmBlock);
        ASSERT_LE(block.column_end - block.column_begin, kGemmBlock);
        for (int64_t i = block.row_begin; i < block.row_end; ++i) {
          for (int64_t j = block.column_begin; j < block.column_end; ++j) {
            ++written[i * columns + j];
            if (symmetric && block.row_begin != block.column_begin) ++written[j * columns + i];
          }
        }
      }
      EXPECT_EQ(written, std::vector<int>(rows * columns, 1)) << rows << " x " << columns;
    }
  }
}

TEST(Gemm, Simd_NanAndInfinity_WhereTheReferenceHasThem) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  Problem problem({20, 30, 40}, false, true);
  problem.a.data()[3 * 40 + 2] = std::numeric_limits<float>::quiet_NaN();
  problem.b.data()[5 * 30 + 4] = std::numeric_limits<float>::infinity();
  const std::vector<float> reference = problem.Run(GemmBlockReference), simd = problem.Run(GemmBlockSimd);
  for (size_t i = 0; i < simd.size(); ++i) {
    EXPECT_TRUE(reference[i] == simd[i] || (std::isnan(reference[i]) && std::isnan(simd[i]))) << i;
    EXPECT_EQ(std::isnan(simd[i]), i / 30 == 3) << i;
  }
}

}  // namespace
}  // namespace shardmesh
