// AdamW with states in fp32: the reference against the formula of core/job/adamw.h in double precision and against the
// documented roundings and draws; SIMD against the reference where numbers and indices are extreme.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <random>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/base/philox.h"
#include "kernels/cpu/processor.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {
namespace {

constexpr WeightFormat kWeightFormats[] = {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Sr};

struct Case {
  WeightFormat weights = WeightFormat::kFp32;
  Format gradients = Format::kFp32;
  int num_slots = 1;
  uint64_t first_element = 0;
  int64_t step = 7;
  bool extreme = false;  // random finite bits: subnormals, zeros of both signs, huge numbers

  std::string ToString() const {
    return absl::StrCat(std::string(WeightFormatName(weights)), ", gradients ", std::string(FormatName(gradients)),
                        ", slots ", num_slots, ", from ", first_element, ", step ", step, extreme ? ", extreme" : "");
  }
};

// Calls check(case) for all formats and many numbers of slots.
template <class Check>
void ForEachCase(const Check& check) {
  for (const WeightFormat weights : kWeightFormats) {
    for (const Format gradients : {Format::kFp32, Format::kBf16}) {
      for (const int slots : {1, 2, 3, 4, 5, 8}) check(Case{weights, gradients, slots});
    }
  }
}

// A stream of 4-byte or 2-byte numbers.
class Numbers {
 public:
  Numbers(bool is_bf16, int64_t elements)
      : is_bf16_(is_bf16), words_(is_bf16 ? 0 : elements), halves_(is_bf16 ? elements : 0) {}
  void Set(int64_t i, float x) {
    if (is_bf16_) halves_[i] = static_cast<uint16_t>(FloatBits(x) >> 16);  // towards zero: stays finite
    if (!is_bf16_) words_[i] = FloatBits(x);
  }
  float operator[](int64_t i) const { return is_bf16_ ? Bf16ToFloat(halves_[i]) : FloatOfBits(words_[i]); }
  void* data() { return is_bf16_ ? static_cast<void*>(halves_.data()) : words_.data(); }
  bool operator==(const Numbers& other) const { return words_ == other.words_ && halves_ == other.halves_; }

 private:
  bool is_bf16_;
  std::vector<uint32_t> words_;
  std::vector<uint16_t> halves_;
};

struct Tensor {
  static constexpr int64_t kElements = 4096 + 64;

  Tensor(const Case& c, uint64_t seed)
      : step_case(c), weights(c.weights != WeightFormat::kFp32, kElements), m(false, kElements), v(false, kElements) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const auto any = [&](float limit) {
      while (true) {
        auto bits = static_cast<uint32_t>(random());
        if (random() % 4 == 0) bits &= 0x807FFFFFu;   // subnormal
        if (random() % 16 == 0) bits &= 0x80000000u;  // zero
        if (std::abs(FloatOfBits(bits)) < limit) return FloatOfBits(bits);
      }
    };
    const auto decade = [&] { return std::pow(10.0f, static_cast<float>(random() % 8) - 6); };
    const float most = FLT_MAX / static_cast<float>(c.num_slots);  // so that the sum is finite
    gradients.assign(c.num_slots, Numbers(c.gradients == Format::kBf16, kElements));
    for (int64_t i = 0; i < kElements; ++i) {
      for (Numbers& slot : gradients) slot.Set(i, c.extreme ? any(most) : normal(random) * decade());
      weights.Set(i, c.extreme ? any(FLT_MAX) : normal(random) * 0.05f);
      m.Set(i, c.extreme ? any(FLT_MAX) : normal(random) * decade());
      v.Set(i, std::abs(c.extreme ? any(FLT_MAX) : normal(random) * decade() * decade()));
    }
  }

  OptimizerContext Context() const {
    OptimizerContext context;
    context.hyper = OptimizerHyper::Defaults(OptimizerKind::kAdamW);
    context.hyper.lr = 3e-3, context.hyper.beta2 = 0.95, context.hyper.eps = 1e-7, context.hyper.weight_decay = 0.1;
    context.scalars = ComputeStepScalars(context.hyper, step_case.step).value();
    context.weights = step_case.weights;
    context.gradients = step_case.gradients;
    context.seed = 0x123456789abcdef0u;
    context.step = step_case.step;
    return context;
  }
  float scale() const { return 1.0f / static_cast<float>(step_case.num_slots); }
  // What `step` makes of it, in other memory.
  Tensor After(OptimizerStepFn step) const {
    Tensor before = *this, after = *this;
    std::vector<const void*> slots;
    for (Numbers& slot : before.gradients) slots.push_back(slot.data());
    OptimizerRun run;
    run.gradients = slots.data();
    run.num_slots = step_case.num_slots;
    run.divide_scale = scale();
    run.weights_in.codes = before.weights.data(), run.weights_out.codes = after.weights.data();
    run.states_in[0].codes = before.m.data(), run.states_out[0].codes = after.m.data();
    run.states_in[1].codes = before.v.data(), run.states_out[1].codes = after.v.data();
    run.num_elements = kElements;
    run.first_element = step_case.first_element;
    run.tensor = kTensor;
    EXPECT_OK(CheckRun(Context(), run));
    step(Context(), run);
    return after;
  }
  bool operator==(const Tensor& other) const { return weights == other.weights && m == other.m && v == other.v; }

  static constexpr uint32_t kTensor = 5;
  Case step_case;
  std::vector<Numbers> gradients;
  Numbers weights, m, v;
};

uint64_t Seed() {
  static const uint64_t seed = std::random_device()();
  return seed;
}

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
Expected Oracle(const Tensor& t, int64_t i) {
  const StepScalars s = t.Context().scalars;
  constexpr double slack = 1.0001;
  double sum = 0, magnitude = 0;
  for (const Numbers& slot : t.gradients) {
    sum += slot[i];
    magnitude += std::abs(slot[i]);
  }
  const double depth = std::ceil(std::log2(t.gradients.size()));  // additions on the longest way through the tree
  const Bounded g = {sum * t.scale(), (depth + 1) * kU * magnitude * t.scale() + kTiny};
  const double m0 = t.m[i], v0 = t.v[i], w0 = t.weights[i];

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

TEST(AdamW, Reference_IsTheFormulaWithinTheDerivedError) {
  ForEachCase([](const Case& c) {
    SCOPED_TRACE(absl::StrCat(c.ToString(), ", seed ", Seed()));
    const Tensor before(c, Seed()), after = before.After(OptimizerStepReference);
    // A whole ulp of bf16 for stochastic rounding, half of one for rounding to nearest.
    const double rounding = c.weights == WeightFormat::kFp32 ? 0 : c.weights == WeightFormat::kBf16 ? 0x1p-8 : 0x1p-7;
    for (int64_t i = 0; i < Tensor::kElements; ++i) {
      const Expected e = Oracle(before, i);
      ASSERT_LE(std::abs(after.m[i] - e.m.value), e.m.error) << "m, element " << i;
      ASSERT_LE(std::abs(after.v[i] - e.v.value), e.v.error) << "v, element " << i;
      ASSERT_LE(std::abs(after.weights[i] - e.weight.value),
                e.weight.error + rounding * (std::abs(e.weight.value) + e.weight.error))
          << "weight, element " << i;
    }
  });
}

// The tolerance must not hide a missing term: it is far below the effect of every hyper-parameter.
TEST(AdamW, DerivedError_IsSmall) {
  const Tensor before(Case(), 1);
  for (int64_t i = 0; i < Tensor::kElements; ++i) {
    const Expected e = Oracle(before, i);
    ASSERT_LT(e.weight.error, 1e-5 * (std::abs(before.weights[i]) + std::abs(e.weight.value)) + 1e-8) << i;
  }
}

// The inputs are the same because a bf16 weight is exact in fp32.
TEST(AdamW, Bf16Weights_AreTheFp32ResultRoundedOnce) {
  const PhiloxKey key = MakePhiloxKey(Tensor(Case(), 1).Context().seed, DrawPurpose::kWeightRounding);
  for (const int64_t step : {int64_t{1}, int64_t{100}, (int64_t{1} << 33) + 5}) {
    for (const WeightFormat format : {WeightFormat::kBf16, WeightFormat::kBf16Sr}) {
      const Tensor before({format, Format::kBf16, 1, 256 * 1234567, step}, 2);
      Tensor exact = before;
      exact.step_case.weights = WeightFormat::kFp32;
      exact.weights = Numbers(false, Tensor::kElements);
      for (int64_t i = 0; i < Tensor::kElements; ++i) exact.weights.Set(i, before.weights[i]);
      const Tensor rounded = before.After(OptimizerStepReference);
      exact = exact.After(OptimizerStepReference);
      for (int64_t i = 0; i < Tensor::kElements; ++i) {
        const float w = exact.weights[i];
        const uint32_t draw = Draw16(key, step, Tensor::kTensor, 256 * 1234567 + i);
        const uint16_t want = format == WeightFormat::kBf16 ? FloatToBf16Rne(w) : FloatToBf16Sr(w, draw);
        ASSERT_EQ(FloatBits(rounded.weights[i]), uint32_t{want} << 16) << before.step_case.ToString() << ", " << i;
      }
    }
  }
}

void ExpectSimdIsTheReference(const Case& c) {
  const Tensor before(c, Seed());
  ASSERT_TRUE(before.After(OptimizerStepSimd) == before.After(OptimizerStepReference))
      << c.ToString() << ", seed " << Seed();
}

TEST(AdamW, Simd_ExtremeNumbers_IsTheReference_BitForBit) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  ForEachCase([](Case c) {
    c.extreme = true;
    for (const int64_t step : {int64_t{1}, int64_t{1} << 40}) {
      c.step = step;
      ExpectSimdIsTheReference(c);
    }
  });
}

// Counters past 32 bits: element 2^35 and beyond, and a tile right before it.
TEST(AdamW, Simd_HugeTensors_IsTheReference_BitForBit) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  for (const uint64_t first : {(uint64_t{1} << 35) - 256, uint64_t{1} << 35, uint64_t{3} << 50}) {
    ExpectSimdIsTheReference({WeightFormat::kBf16Sr, Format::kBf16, 1, first});
  }
}

#if defined(__x86_64__)
// A caller that flushes subnormals and rounds towards zero gets the same bits, and its settings back.
TEST(AdamW, CallersFloatingPointEnvironment_DoesNotMatter) {
  for (const OptimizerStepFn step : {OptimizerStepReference, BestOptimizerStep()}) {
    Case c;
    c.num_slots = 4;
    c.extreme = true;
    const Tensor before(c, Seed()), expected = before.After(step);
    const unsigned saved = _mm_getcsr();
    const unsigned odd = saved | 0x8040 /* flush to zero, subnormals are zero */ | 0x6000 /* towards zero */;
    // Not around After, which computes scalars.
    static OptimizerStepFn inner;
    static unsigned odd_before, odd_after;
    inner = step, odd_before = odd;
    const Tensor got = before.After([](const OptimizerContext& context, const OptimizerRun& run) {
      const unsigned mine = _mm_getcsr();
      _mm_setcsr(odd_before);
      inner(context, run);
      odd_after = _mm_getcsr();
      _mm_setcsr(mine);
    });
    EXPECT_EQ(odd_after & ~0x3Fu, odd & ~0x3Fu);
    EXPECT_TRUE(got == expected) << "seed " << Seed();
  }
}
#endif

}  // namespace
}  // namespace shardmesh
