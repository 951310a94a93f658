// The reference against the formula of core/adamw.h in double precision, and against the documented roundings and
// draws.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <random>

#include "kernels/run_fixture.h"

namespace shardmesh {
namespace {

constexpr double kU = 0x1p-24;          // half an ulp of fp32, relative: the error of one operation
constexpr double kTiny = FLT_TRUE_MIN;  // the error of one operation that underflows

// A value and a bound of the error that fp32 may have made on the way to it.
struct Bounded {
  double value;
  double error;
};

struct Expected {
  Bounded m, v, weight;
};

// The formula in double, and beside it the running error analysis of the order of operations in kernels/rules/adamw.h:
// every operation adds kU of its result, and passes on its operands' errors to first order; `slack` covers the second
// order.
Expected Oracle(const RunFixture& f, const RunCase& c, int64_t i) {
  const AdamWScalars& s = f.context().scalars;
  constexpr double slack = 1.0001;
  double sum = 0, magnitude = 0;
  for (const auto& slot : f.gradients) {
    sum += f.At(f.image(), slot, i);
    magnitude += std::abs(f.At(f.image(), slot, i));
  }
  const float scale = 1.0f / static_cast<float>(c.num_slots);
  const double depth = std::ceil(std::log2(c.num_slots));  // additions on the longest way through the tree
  const Bounded g = {sum * scale, (depth + 1) * kU * magnitude * scale + kTiny};
  const double m0 = f.At(f.image(), f.m_in, i), v0 = f.At(f.image(), f.v_in, i), w0 = f.At(f.image(), f.weights_in, i);

  Expected e;
  e.m.value = double{s.beta1} * m0 + double{s.one_minus_beta1} * g.value;
  e.m.error = slack * (s.one_minus_beta1 * (g.error + kU * std::abs(g.value)) + kU * std::abs(e.m.value)) + 2 * kTiny;
  e.v.value = double{s.beta2} * v0 + double{s.one_minus_beta2} * g.value * g.value;
  e.v.error =
      slack * (s.one_minus_beta2 * (2 * std::abs(g.value) * g.error + 2 * kU * g.value * g.value + g.error * g.error) +
               kU * e.v.value) +
      2 * kTiny;
  const double root = std::sqrt(e.v.value);
  const double root_error =
      std::sqrt(e.v.value + e.v.error) - std::sqrt(std::max(0.0, e.v.value - e.v.error)) + kU * root;
  const double d = root * s.inv_sqrt_bias2 + s.eps;
  const double d_error = slack * (root_error * s.inv_sqrt_bias2 + kU * d) + kTiny;
  const double q = e.m.value / d;
  const double q_error = slack * (e.m.error + std::abs(q) * d_error) / (d - d_error) + slack * kU * std::abs(q) + kTiny;
  e.weight.value = w0 * s.decay + s.neg_step_size * q;
  e.weight.error =
      slack * (std::abs(s.neg_step_size) * q_error + kU * std::abs(w0) + kU * std::abs(e.weight.value)) + 2 * kTiny;
  return e;
}

TEST(FusedStepOracleTest, ReferenceEqualsTheFormulaWithinTheDerivedError) {
  const uint64_t seed = std::random_device()();
  for (int slots : {1, 2, 3, 4, 5, 8}) {
    for (Format gradients : {Format::kFp32, Format::kBf16}) {
      for (Format weights : {Format::kFp32, Format::kBf16, Format::kBf16Sr}) {
        RunCase c;
        c.weights = weights;
        c.gradients = gradients;
        c.num_slots = slots;
        c.num_elements = 4096;
        const RunFixture f(c, seed);
        SCOPED_TRACE(testing::Message() << ToString(c) << ", seed " << seed);
        const auto image = f.Apply(FusedStepReference);
        // A whole ulp of bf16 for stochastic rounding, half of one for rounding to nearest.
        const double rounding = weights == Format::kFp32 ? 0 : weights == Format::kBf16 ? 0x1p-8 : 0x1p-7;
        for (int64_t i = 0; i < c.num_elements; ++i) {
          const Expected e = Oracle(f, c, i);
          ASSERT_LE(std::abs(f.At(image, f.m_out, i) - e.m.value), e.m.error) << "m, element " << i;
          ASSERT_LE(std::abs(f.At(image, f.v_out, i) - e.v.value), e.v.error) << "v, element " << i;
          ASSERT_LE(std::abs(f.At(image, f.weights_out, i) - e.weight.value),
                    e.weight.error + rounding * (std::abs(e.weight.value) + e.weight.error))
              << "weight, element " << i;
        }
      }
    }
  }
}

// The tolerance must not hide a missing term: it is far below the effect of every hyper-parameter.
TEST(FusedStepOracleTest, ToleranceIsSmall) {
  RunCase c;
  c.weights = Format::kFp32;
  c.num_elements = 4096;
  const RunFixture f(c, 1);
  for (int64_t i = 0; i < c.num_elements; ++i) {
    const Expected e = Oracle(f, c, i);
    const double w0 = std::abs(f.At(f.image(), f.weights_in, i));
    ASSERT_LT(e.weight.error, 1e-5 * (w0 + std::abs(e.weight.value)) + 1e-8) << i;
  }
}

// bf16 weights are the fp32 result, rounded once, by the documented rule and draw. The inputs are the same because a
// bf16 weight is exact in fp32.
TEST(FusedStepOracleTest, Bf16WeightsAreTheFp32ResultRoundedOnce) {
  RunCase c;
  c.num_elements = 4096 + 64;
  c.first_element = 64 * 1234567;
  for (int64_t step : {int64_t{1}, int64_t{100}, (int64_t{1} << 33) + 5}) {
    c.step = step;
    for (Format weights : {Format::kBf16, Format::kBf16Sr}) {
      c.weights = weights;
      const RunFixture f(c, 2);
      const auto image = f.Apply(FusedStepReference);
      std::vector<float> w, m, v;
      for (int64_t i = 0; i < c.num_elements; ++i) {
        w.push_back(f.At(f.image(), f.weights_in, i));
        m.push_back(f.At(f.image(), f.m_in, i));
        v.push_back(f.At(f.image(), f.v_in, i));
      }
      std::vector<uint8_t> arena = f.image();
      const std::vector<const void*> pointers = f.Gradients(arena.data());
      FusedRun run = f.Bind(arena.data(), pointers.data());
      run.weights_in = run.weights_out = w.data();
      run.m_in = run.m_out = m.data();
      run.v_in = run.v_out = v.data();
      StepContext context = f.context();
      context.weights = Format::kFp32;
      FusedStepReference(context, run);
      for (int64_t i = 0; i < c.num_elements; ++i) {
        const uint32_t draw = Draw16(context.key, step, run.tensor, c.first_element + i);
        const uint16_t want = weights == Format::kBf16 ? FloatToBf16Rne(w[i]) : FloatToBf16Sr(w[i], draw);
        ASSERT_EQ(f.HalfAt(image, f.weights_out, i), want) << ToString(c) << ", element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
