// Muon's step against the same written down plainly, bit for bit, and that against float64.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/base/reduction.h"
#include "kernels/muon/muon.h"
#include "kernels/muon/muon_fixture.h"
#include "kernels/muon/newton_schulz.h"

namespace shardmesh {
namespace {

constexpr double kUnit = 1.0 / (1 << 24);
using Doubles = std::vector<double>;

// The step of kernels/muon/muon.h's head, written down once more without tiles.
struct Model {
  Floats weights, momentum;
  Floats start;  // X, rows <= columns

  static float Lerp(float start, float end, const LerpScalars& l) {
    return std::fma(l.coefficient, end - start, l.from_end ? end : start);
  }
  static float Norm(const Floats& update, float eps) {
    Floats sums;
    for (size_t tile = 0; tile < update.size(); tile += 256) {
      float lanes[8] = {};
      for (size_t i = tile; i < std::min(tile + 256, update.size()); ++i) {
        lanes[i % 8] = std::fma(update[i], update[i], lanes[i % 8]);
      }
      sums.push_back(((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7])));
    }
    const float sum = TreeSum<float>(static_cast<int>(sums.size()), [&](int i) { return sums[i]; });
    return std::max(std::sqrt(sum), eps);
  }

  static Floats Orthogonalize(const MuonScalars& s, Floats x, int64_t rows, int64_t columns) {
    Floats next(x.size()), gram(rows * rows), polynomial(rows * rows);
    std::vector<GemmScratch> scratch(1);
    const NewtonSchulzMemory memory = {x.data(), next.data(), gram.data(), polynomial.data(), scratch.data()};
    const float* o = NewtonSchulz(s, rows, columns, memory, GemmBlockReference, Parallel());
    return {o, o + x.size()};
  }

  void Step(const MuonScalars& s, const Floats& gradient, int64_t rows, int64_t columns) {
    Floats update(gradient.size());
    for (size_t i = 0; i < gradient.size(); ++i) {
      momentum[i] = Lerp(momentum[i], gradient[i], s.buffer);
      update[i] = s.is_nesterov ? Lerp(gradient[i], momentum[i], s.nesterov) : momentum[i];
    }
    const float norm = Norm(update, s.eps);
    for (float& x : update) x = x / norm;
    const bool tall = rows > columns;
    start = tall ? Transposed(update, rows, columns) : update;
    const int64_t low = std::min(rows, columns), high = std::max(rows, columns);
    Floats direction = Orthogonalize(s, start, low, high);
    if (tall) direction = Transposed(direction, low, high);
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = std::fma(s.neg_step_size, direction[i], weights[i] * s.decay);
    }
  }
};

TEST(Muon, FourSteps_WrittenDownPlainly_SameBits) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{7, 13}, {65, 33}, {40, 64}}) {
    for (const bool nesterov : {false, true}) {
      Settings settings;
      settings.hyper.nesterov = nesterov;
      settings.hyper.lr = 0.02;
      settings.options.lr_adjust = nesterov ? MuonLrAdjust::kMatchRmsAdamW : MuonLrAdjust::kOriginal;
      Matrix matrix(settings, rows, columns);
      Model model{Normals(matrix.n(), 1), Floats(matrix.n()), {}};
      matrix.SetWeights(model.weights);
      const MuonScalars scalars = ComputeMuonScalars(settings.hyper, settings.options, rows, columns).value();
      for (uint64_t t = 0; t < 4; ++t) {
        const Floats gradient = Normals(matrix.n(), 30 + t);
        matrix.Step(MuonStepReference, {gradient}, Parallel());
        model.Step(scalars, gradient, rows, columns);
        ASSERT_EQ(matrix.Weights(), model.weights);
        ASSERT_EQ(matrix.Momentum(), model.momentum);
      }
    }
  }
}

Doubles Wide(const Floats& x) { return {x.begin(), x.end()}; }

double Norm(const Doubles& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

double Distance(const Doubles& a, const Doubles& b) {
  Doubles difference(a.size());
  for (size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return Norm(difference);
}

// One iteration in float64, with the coefficients as they are rounded to fp32.
Doubles Iteration(const MuonScalars& s, const Doubles& x, int64_t rows, int64_t columns) {
  Doubles gram(rows * rows), polynomial(rows * rows), next(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t k = 0; k < columns; ++k) gram[i * rows + j] += x[i * columns + k] * x[j * columns + k];
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < rows; ++j) {
      double square = 0;
      for (int64_t k = 0; k < rows; ++k) square += gram[i * rows + k] * gram[k * rows + j];
      polynomial[i * rows + j] = s.b * gram[i * rows + j] + s.c * square;
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double& out = next[i * columns + j] = s.a * x[i * columns + j];
      for (int64_t k = 0; k < rows; ++k) out += polynomial[i * rows + k] * x[k * columns + j];
    }
  }
  return next;
}

// With u = 2^-24: the update U has a few roundings, each at most u (|g| + |B|): the two weights of lerp, two
// differences, two results, and the rounded buffer enters the second lerp twice: 8 u (|g| + |B|) in all, relative to
// |U| twice (X changes, and the norm does). The norm adds 35 + log2(tiles) roundings of squares, half of that after the
// root, which rounds like the division: below 24 u here. What iteration t errs by arrives enlarged at
// most 4.3^(iterations left) (kernels/ newton_schulz_test.cc, which bounds what it may be). The weight's own roundings
// are four.
TEST(Muon, OneStep_Float64Oracle_WithinTheErrorOfItsRoundings) {
  constexpr double kGrowth = 4.3;
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {13, 40}, {40, 13}, {48, 48}, {65, 33}}) {
    Settings settings;
    settings.hyper.lr = 0.02;
    const int64_t low = std::min(rows, columns), high = std::max(rows, columns), n = rows * columns;
    Matrix matrix(settings, rows, columns);
    Model model{Normals(n, 1), Normals(n, 3), {}};
    const Doubles buffer = Wide(model.momentum);
    matrix.SetMomentum(model.momentum);
    const Doubles before = Wide(model.weights);
    matrix.SetWeights(model.weights);
    const Floats gradient = Normals(n, 2);
    MuonScalars scalars = ComputeMuonScalars(settings.hyper, settings.options, rows, columns).value();
    matrix.Step(MuonStepReference, {gradient});
    model.Step(scalars, gradient, rows, columns);
    ASSERT_EQ(matrix.Weights(), model.weights);

    Doubles exact(n);
    for (int64_t i = 0; i < n; ++i) {
      const double g = gradient[i], moved = buffer[i] + (1 - 0.95) * (g - buffer[i]);
      exact[rows > columns ? i % columns * rows + i / columns : i] = g + 0.95 * (moved - g);
    }
    const double norm = Norm(exact);
    for (double& x : exact) x /= norm;
    double error = Distance(Wide(model.start), exact);
    EXPECT_LE(error, kUnit * (2 * 8 * (Norm(Wide(gradient)) + Norm(buffer)) / norm + 24));

    Doubles from = Wide(model.start);
    for (int t = 0; t < 5; ++t) {
      MuonScalars one = scalars;
      one.iterations = 1;
      const Floats to = Model::Orthogonalize(one, Floats(from.begin(), from.end()), low, high);
      error = kGrowth * error + Distance(Wide(to), Iteration(scalars, from, low, high));
      exact = Iteration(scalars, exact, low, high);
      from = Wide(to);
    }
    EXPECT_LE(Distance(from, exact), 1.001 * error + 1e-12);

    const double lr = 0.02 * std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
    Doubles weights(n);
    for (int64_t i = 0; i < n; ++i) {
      const double direction = rows > columns ? exact[i % columns * rows + i / columns] : exact[i];
      weights[i] = before[i] * (1 - 0.02 * 0.1) - lr * direction;
    }
    const double roundings = kUnit * (lr * Norm(exact) + Norm(weights) + 2 * Norm(before));
    EXPECT_LE(Distance(Wide(matrix.Weights()), weights), 1.001 * (lr * error + roundings)) << rows << " x " << columns;
  }
}

}  // namespace
}  // namespace shardmesh
