#include "kernels/muon/newton_schulz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/muon/blas.h"

namespace shardmesh {
namespace {

constexpr double kUnit = 1.0 / (1 << 24);

using Doubles = std::vector<double>;

MuonScalars Scalars(int iterations) {
  MuonOptions options;
  options.iterations = iterations;
  return ComputeMuonScalars(OptimizerHyper::Defaults(OptimizerKind::kMuon), options, 1, 1).value();
}

// With our own products, or with a BLAS's.
std::vector<float> Iterate(std::vector<float> x, int64_t rows, int64_t columns, int iterations,
                           const Blas* blas = nullptr) {
  std::vector<float> next(x.size()), gram(rows * rows), polynomial(rows * rows);
  std::vector<GemmScratch> scratch(1);
  const NewtonSchulzMemory memory = {x.data(), next.data(), gram.data(), polynomial.data(), scratch.data()};
  const float* result =
      blas == nullptr
          ? NewtonSchulz(Scalars(iterations), rows, columns, memory, GemmBlockReference, Parallel())
          : NewtonSchulz(Scalars(iterations), rows, columns, memory, [&](const Gemm& gemm) { blas->Multiply(gemm); });
  return {result, result + x.size()};
}

// a [n][k] times b [k][m], or b [m][k] transposed.
Doubles Product(const Doubles& a, const Doubles& b, int64_t n, int64_t k, int64_t m, bool transposed_b) {
  Doubles out(n * m);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      for (int64_t l = 0; l < k; ++l) out[i * m + j] += a[i * k + l] * (transposed_b ? b[j * k + l] : b[l * m + j]);
    }
  }
  return out;
}

template <class Function>
Doubles Map(const Doubles& a, const Doubles& b, Function function) {
  Doubles out(a.size());
  std::transform(a.begin(), a.end(), b.begin(), out.begin(), function);
  return out;
}

Doubles Magnitudes(const Doubles& a) {
  return Map(a, a, [](double x, double) { return std::abs(x); });
}

struct Iteration {
  Doubles exact;  // of the given X
  Doubles bound;  // on what fp32 differs from it, element by element
};

// One iteration in float64, and how far the fp32 one may be from it. With |.| element by element and u = 2^-24, a sum
// of k fused multiply-adds is within k u |A||B| of A B (Higham, 2002, 3.1). So
//   G' = X X^T + dG,       |dG| <= k u |X||X^T|
//   P' = b G' + c G' G',   |dP| <= |b| |dG| + |c| (|dG||G| + |G||dG|) + |c| (m + 1) u |G||G| + u |P|
//   X' = a X + P' X,       |dX| <= |dP||X| + m u |P||X| + u |X'|
// (the + 1 is the rounding of c times the sum); terms of second order are covered by the factor. A BLAS may add in any
// order, fused or not, and multiply by c before: each term is still rounded no more often. But it may begin with the
// addend, which is then rounded with every term: m u |b| |G| more in P', m u |a| |X| more in X'.
Iteration Oracle(const MuonScalars& s, const Doubles& x, int64_t m, int64_t k, bool is_blas = false) {
  const double ku = static_cast<double>(k) * kUnit, mu = static_cast<double>(m) * kUnit;
  const double addend_mu = is_blas ? mu : 0;
  const double a = s.a, b = s.b, c = s.c;
  const Doubles abs_x = Magnitudes(x);
  const Doubles gram = Product(x, x, m, k, m, true), abs_gram = Magnitudes(gram);
  Doubles gram_error = Product(abs_x, abs_x, m, k, m, true);
  for (double& e : gram_error) e *= ku;

  const Doubles square = Product(gram, gram, m, m, m, false), abs_square = Product(abs_gram, abs_gram, m, m, m, false);
  const Doubles polynomial = Map(gram, square, [&](double g, double g2) { return b * g + c * g2; });
  const Doubles crossed = Map(Product(gram_error, abs_gram, m, m, m, false),
                              Product(abs_gram, gram_error, m, m, m, false), std::plus<double>());
  Doubles polynomial_error(gram.size());
  for (size_t i = 0; i < gram.size(); ++i) {
    polynomial_error[i] = std::abs(b) * gram_error[i] + std::abs(c) * (crossed[i] + (mu + kUnit) * abs_square[i]) +
                          kUnit * std::abs(polynomial[i]) + addend_mu * std::abs(b * gram[i]);
  }

  Iteration out;
  out.exact = Map(x, Product(polynomial, x, m, m, k, false), [&](double v, double px) { return a * v + px; });
  out.bound =
      Map(Product(polynomial_error, abs_x, m, m, k, false), Product(Magnitudes(polynomial), abs_x, m, m, k, false),
          [&](double from_polynomial, double sum) { return from_polynomial + mu * sum; });
  for (size_t i = 0; i < x.size(); ++i) {
    out.bound[i] = 1.01 * (out.bound[i] + kUnit * std::abs(out.exact[i]) + addend_mu * std::abs(a * x[i]));
  }
  return out;
}

double Distance(const Doubles& a, const Doubles& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares);
}

std::vector<float> Normalized(int64_t rows, int64_t columns) {
  std::mt19937_64 random(rows * 1000 + columns);
  std::normal_distribution<double> normal;
  Doubles x(rows * columns);
  for (double& v : x) v = normal(random);
  const double norm = Distance(x, Doubles(x.size()));
  std::vector<float> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = static_cast<float>(x[i] / norm);
  return out;
}

class NewtonSchulzTest : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Shapes, NewtonSchulzTest,
                         ::testing::Values(std::pair{1, 1}, std::pair{1, 9}, std::pair{7, 13}, std::pair{33, 65},
                                           std::pair{64, 64}, std::pair{24, 130}));

// Each iteration is held against float64 from where fp32 stands, with the bound above. All of them together: the map of
// one iteration acts on singular values as p(s) = a s + b s^3 + c s^5, which keeps [0, 1.2025] within itself, and its
// derivative is no larger in the Frobenius norm than the differences (p(s) - p(t)) / (s - t) and (p(s) + p(t)) / (s +
// t) are (Noferini, "A formula for the Frechet derivative of a generalized matrix function", SIMAX 38, 2017): 4.3 on
// [0, 1.21]. So what iteration t errs by arrives at the end enlarged at most 4.3^(iterations left).
TEST_P(NewtonSchulzTest, FiveIterations_Float64Oracle_WithinTheErrorOfTheirRoundings) {
  constexpr double kGrowth = 4.3;
  const auto [rows, columns] = GetParam();
  const std::vector<float> start = Normalized(rows, columns);
  std::vector<float> x = start;
  Doubles exact(start.begin(), start.end());
  double error = 0;
  for (int t = 0; t < 5; ++t) {
    const Iteration one = Oracle(Scalars(1), Doubles(x.begin(), x.end()), rows, columns);
    x = Iterate(x, rows, columns, 1);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], one.exact[i], one.bound[i]) << "iteration " << t;
    error = kGrowth * error + Distance(Doubles(x.begin(), x.end()), one.exact);
    exact = Oracle(Scalars(1), exact, rows, columns).exact;
  }
  EXPECT_EQ(x, Iterate(start, rows, columns, 5));
  EXPECT_LE(Distance(Doubles(x.begin(), x.end()), exact), 1.01 * error + 1e-12);
  EXPECT_LE(error, 1e-3);
}

// So the two are no farther apart than both from float64.
TEST_P(NewtonSchulzTest, FiveIterationsWithABlas_WithinTheErrorOfBothFromOurs) {
  constexpr double kGrowth = 4.3;
  const absl::StatusOr<const Blas*> blas = Blas::Find();
  if (!blas.ok()) GTEST_SKIP() << "SKIPPED: " << blas.status().message();
  const auto [rows, columns] = GetParam();
  std::vector<float> ours = Normalized(rows, columns), fast = ours;
  double our_error = 0, fast_error = 0;
  for (int t = 0; t < 5; ++t) {
    const Iteration of_ours = Oracle(Scalars(1), Doubles(ours.begin(), ours.end()), rows, columns);
    const Iteration of_fast = Oracle(Scalars(1), Doubles(fast.begin(), fast.end()), rows, columns, /*is_blas=*/true);
    ours = Iterate(ours, rows, columns, 1);
    fast = Iterate(fast, rows, columns, 1, *blas);
    for (size_t i = 0; i < fast.size(); ++i) ASSERT_NEAR(fast[i], of_fast.exact[i], of_fast.bound[i]) << t;
    our_error = kGrowth * our_error + Distance(Doubles(ours.begin(), ours.end()), of_ours.exact);
    fast_error = kGrowth * fast_error + Distance(Doubles(fast.begin(), fast.end()), of_fast.exact);
  }
  EXPECT_LE(Distance(Doubles(fast.begin(), fast.end()), Doubles(ours.begin(), ours.end())),
            1.01 * (our_error + fast_error) + 1e-12);
  EXPECT_LE(our_error + fast_error, 2e-3);
}

// The result does what it is for: the rows of a matrix that is far from singular become nearly orthonormal.
TEST(NewtonSchulz, WellConditioned_FiveIterations_SingularValuesNearOne) {
  constexpr int64_t kRows = 24, kColumns = 130;
  const std::vector<float> o = Iterate(Normalized(kRows, kColumns), kRows, kColumns, 5);
  const Doubles wide(o.begin(), o.end());
  const Doubles gram = Product(wide, wide, kRows, kColumns, kRows, true);
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kRows; ++j) {
      if (i == j) {
        EXPECT_NEAR(gram[i * kRows + j], 1, 0.5);
      } else {
        EXPECT_NEAR(gram[i * kRows + j], 0, 0.25);
      }
    }
  }
}

TEST(NewtonSchulz, NoIteration_GivesTheMatrixBack) {
  const std::vector<float> x = Normalized(3, 5);
  EXPECT_EQ(Iterate(x, 3, 5, 0), x);
}

}  // namespace
}  // namespace shardmesh
