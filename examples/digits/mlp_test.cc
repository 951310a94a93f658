#include "examples/digits/mlp.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "core/base/matchers.h"
#include "examples/digits/exact_math.h"
#include "gtest/gtest.h"

namespace shardmesh::digits {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 20240607;
constexpr int kSlots = 4;
constexpr int kBatch = 32;

using Tensors = std::vector<std::vector<float>>;  // one per parameter

const Dataset& Digits() {
  static const Dataset* const set = new Dataset(Dataset::Load("examples/digits/digits.bin").value());
  return *set;
}

Tensors Initial(uint64_t seed) {
  Tensors tensors;
  for (size_t p = 0; p < Parameters().size(); ++p) tensors.push_back(InitialValues(seed, static_cast<int>(p)).value());
  return tensors;
}

std::vector<ConstTensorView> Const(const Tensors& tensors) {
  std::vector<ConstTensorView> views;
  for (const auto& t : tensors) views.push_back({Element::kFloat32, t.data(), t.size()});
  return views;
}

std::vector<TensorView> Mutable(Tensors& tensors) {
  std::vector<TensorView> views;
  for (auto& t : tensors) views.push_back({Element::kFloat32, t.data(), t.size()});
  return views;
}

double Loss(const Tensors& weights, absl::Span<const int> batch) {
  return Evaluate(Digits(), batch, Const(weights)).value().loss;
}

std::vector<int> Batch(int64_t step, int slot) {
  return BatchIndices(Digits().train(), {kSeed, step, slot, kSlots, kBatch}).value();
}

// Plain AdamW (Loshchilov and Hutter 2019) in fp32, to show that the example learns; the service's own lies elsewhere.
struct AdamW {
  float lr = 3e-3f, beta1 = 0.9f, beta2 = 0.999f, epsilon = 1e-8f, weight_decay = 0.01f;
  Tensors m, v;
  void Step(int t, const Tensors& gradients, Tensors& weights) {
    if (m.empty()) {
      for (const auto& w : weights) m.emplace_back(w.size(), 0.0f);
      v = m;
    }
    const float correct1 = 1.0f - std::pow(beta1, static_cast<float>(t)),
                correct2 = 1.0f - std::pow(beta2, static_cast<float>(t));
    for (size_t p = 0; p < weights.size(); ++p) {
      for (size_t i = 0; i < weights[p].size(); ++i) {
        const float g = gradients[p][i];
        m[p][i] = beta1 * m[p][i] + (1 - beta1) * g;
        v[p][i] = beta2 * v[p][i] + (1 - beta2) * g * g;
        const float step = (m[p][i] / correct1) / (std::sqrt(v[p][i] / correct2) + epsilon);
        weights[p][i] -= lr * (step + weight_decay * weights[p][i]);
      }
    }
  }
};

// The mean over the slots' gradients, as the service forms it.
Tensors StepGradient(int64_t step, const Tensors& weights) {
  Tensors sum;
  for (const auto& w : weights) sum.emplace_back(w.size(), 0.0f);
  for (int slot = 0; slot < kSlots; ++slot) {
    Tensors gradients = sum;
    EXPECT_OK(LossAndGradients(Digits(), Batch(step, slot), Const(weights), Mutable(gradients)));
    for (size_t p = 0; p < sum.size(); ++p) {
      for (size_t i = 0; i < sum[p].size(); ++i) sum[p][i] = (slot == 0 ? 0.0f : sum[p][i]) + gradients[p][i] / kSlots;
    }
  }
  return sum;
}

TEST(Mlp, Parameters_AreSixNamedTensors) {
  const auto& specs = Parameters();
  ASSERT_EQ(specs.size(), 6u);
  EXPECT_EQ(specs[0].name, "layers.0.weight");
  EXPECT_EQ(specs[0].shape, (std::vector<int64_t>{128, 64}));
  EXPECT_EQ(specs[1].name, "layers.0.bias");
  EXPECT_EQ(specs[4].shape, (std::vector<int64_t>{10, 64}));
  EXPECT_EQ(specs[5].name, "layers.2.bias");
  size_t total = 0;
  for (const auto& spec : specs) total += spec.num_elements();
  EXPECT_EQ(total, 17226u);
}

TEST(Mlp, InitialValues_AreBoundedSpreadAndOfTheSeed) {
  const float bound = std::sqrt(6.0f / 64);
  ASSERT_OK_AND_ASSIGN(const auto values, InitialValues(1, 0));
  double sum = 0, squares = 0;
  for (float value : values) {
    EXPECT_LT(std::fabs(value), bound);
    sum += value;
    squares += double{value} * value;
  }
  EXPECT_NEAR(sum / values.size(), 0, 0.01);                       // 5 standard errors: 5 * bound / sqrt(3 * 8192)
  EXPECT_NEAR(squares / values.size(), bound * bound / 3, 0.002);  // uniform: b^2 / 3 = 0.03125
  EXPECT_EQ(values, InitialValues(1, 0).value());
  EXPECT_NE(values, InitialValues(2, 0).value());
  EXPECT_EQ(InitialValues(1, 1).value(), std::vector<float>(128, 0.0f));
  EXPECT_THAT(InitialValues(1, 6), StatusIs(StatusCode::kInvalidArgument, HasSubstr("parameter 6")));
}

TEST(Mlp, ExactMath_AgreesWithTheLibrary) {
  for (double x = -60; x <= 0; x += 0.0137) EXPECT_NEAR(ExactExp(x) / std::exp(x), 1, 1e-12) << x;
  for (double x = 1e-3; x < 2000; x *= 1.0137) EXPECT_NEAR(ExactLog(x), std::log(x), 1e-12) << x;
  EXPECT_EQ(ExactExp(0), 1.0);
  EXPECT_EQ(ExactExp(-1e6), 0.0);
  EXPECT_EQ(ExactLog(1), 0.0);
}

// Along a random direction per parameter: the change of the loss is the gradient times the direction.
TEST(Mlp, Gradients_MatchFiniteDifferences) {
  const uint32_t seed = 4711;  // fixed: a direction across a ReLU's corner would be no error of the gradient
  std::mt19937 random(seed);
  const std::vector<int> batch = Batch(1, 0);
  Tensors weights = Initial(kSeed);
  for (auto& bias : {1, 3, 5})
    for (float& b : weights[bias]) b = (static_cast<float>(random() % 1000) - 500.0f) / 5000;
  Tensors gradients = weights;
  ASSERT_OK_AND_ASSIGN(const double loss, LossAndGradients(Digits(), batch, Const(weights), Mutable(gradients)));
  EXPECT_NEAR(loss, Loss(weights, batch), 1e-12);
  for (size_t p = 0; p < weights.size(); ++p) {
    for (int round = 0; round < 4; ++round) {
      Tensors up = weights, down = weights;
      double expected = 0;
      const double size = 2e-3 / std::sqrt(static_cast<double>(weights[p].size()));
      for (size_t i = 0; i < weights[p].size(); ++i) {
        // In the direction of the gradient's sign, with random lengths: the sum cannot cancel.
        const float d = static_cast<float>(size * (1 + random() % 8) * (gradients[p][i] < 0 ? -1 : 1));
        up[p][i] += d;
        down[p][i] -= d;
        expected += gradients[p][i] * (double{up[p][i]} - down[p][i]);
      }
      EXPECT_NEAR((Loss(up, batch) - Loss(down, batch)) / expected, 1, 5e-3)
          << Parameters()[p].name << " seed " << seed;
    }
  }
}

TEST(Mlp, Gradients_OfABatch_AreTheMeanOverItsImages) {
  const Tensors weights = Initial(kSeed);
  const std::vector<int> batch = {10, 20, 30};
  Tensors whole = weights, single = weights, mean;
  for (const auto& w : weights) mean.emplace_back(w.size(), 0.0f);
  ASSERT_OK(LossAndGradients(Digits(), batch, Const(weights), Mutable(whole)));
  for (int index : batch) {
    ASSERT_OK(LossAndGradients(Digits(), {index}, Const(weights), Mutable(single)));
    for (size_t p = 0; p < mean.size(); ++p) {
      for (size_t i = 0; i < mean[p].size(); ++i) mean[p][i] += single[p][i] / 3;
    }
  }
  for (size_t p = 0; p < mean.size(); ++p) {
    float largest = 0;
    for (size_t i = 0; i < mean[p].size(); ++i) largest = std::max(largest, std::fabs(mean[p][i] - whole[p][i]));
    EXPECT_LT(largest, 1e-6f) << Parameters()[p].name;  // gradients are below 1 here: a few fp32 roundings
  }
}

TEST(Mlp, Bfloat16Views_ReadExactlyAndWriteRounded) {
  Tensors weights = Initial(kSeed), gradients = weights;
  std::vector<std::vector<char>> weight_bytes, gradient_bytes;  // an odd start: no alignment is asked for
  std::vector<ConstTensorView> weight_views;
  std::vector<TensorView> gradient_views;
  for (auto& w : weights) {
    weight_bytes.emplace_back(1 + 2 * w.size());
    gradient_bytes.emplace_back(1 + 2 * w.size());
    ASSERT_OK(Store(w, {Element::kBfloat16, weight_bytes.back().data() + 1, w.size()}));
    weight_views.push_back({Element::kBfloat16, weight_bytes.back().data() + 1, w.size()});
    gradient_views.push_back({Element::kBfloat16, gradient_bytes.back().data() + 1, w.size()});
    w = Load(weight_views.back()).value();
  }
  ASSERT_OK_AND_ASSIGN(const double mixed, LossAndGradients(Digits(), Batch(1, 0), weight_views, gradient_views));
  ASSERT_OK_AND_ASSIGN(const double plain, LossAndGradients(Digits(), Batch(1, 0), Const(weights), Mutable(gradients)));
  EXPECT_EQ(mixed, plain);
  for (size_t p = 0; p < weights.size(); ++p) {
    std::vector<uint16_t> rounded(weights[p].size());
    ASSERT_OK(Store(gradients[p], {Element::kBfloat16, rounded.data(), rounded.size()}));
    EXPECT_EQ(std::memcmp(rounded.data(), gradient_bytes[p].data() + 1, 2 * rounded.size()), 0) << Parameters()[p].name;
  }
}

TEST(Mlp, Store_Bfloat16_RoundsToNearestEven) {
  const float inf = std::numeric_limits<float>::infinity();
  // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7: even is 1; 1 + 3 * 2^-8 lies halfway and goes up.
  const std::vector<float> values = {1.0f, 1.00390625f, 1.00390637f, 1.01171875f, -2.5f, 3.4e38f, inf, std::nanf("")};
  std::vector<uint16_t> halves(values.size());
  ASSERT_OK(Store(values, {Element::kBfloat16, halves.data(), halves.size()}));
  EXPECT_EQ(std::vector<uint16_t>(halves.begin(), halves.end() - 1),
            (std::vector<uint16_t>{0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xC020, 0x7F80, 0x7F80}));
  EXPECT_TRUE(std::isnan(Load({Element::kBfloat16, &halves.back(), 1}).value()[0]));
}

TEST(Mlp, BadArguments_AreNamedAndWriteNothing) {
  Tensors weights = Initial(kSeed), gradients;
  for (const auto& w : weights) gradients.emplace_back(w.size(), 42.0f);
  const Tensors before = gradients;
  const auto expect = [&](absl::Span<const int> batch, absl::Span<const ConstTensorView> w,
                          absl::Span<const TensorView> g, StatusCode code, const char* message) {
    EXPECT_THAT(LossAndGradients(Digits(), batch, w, g), StatusIs(code, HasSubstr(message)));
    EXPECT_EQ(gradients, before);
  };
  const auto w = Const(weights);
  const auto g = Mutable(gradients);
  expect({}, w, g, StatusCode::kInvalidArgument, "batch is empty");
  expect({1797}, w, g, StatusCode::kInvalidArgument, "image 1797 is not in the data set of 1797");
  expect({-1}, w, g, StatusCode::kInvalidArgument, "image -1");
  expect({0}, absl::MakeSpan(w).subspan(1), g, StatusCode::kInvalidArgument, "5 views of weights, expected 6");
  auto short_view = g;
  short_view[3].num_elements = 63;
  expect({0}, w, short_view, StatusCode::kInvalidArgument,
         "gradients of layers.1.bias: wrong length, 63 elements, expected 64");
  auto no_memory = w;
  no_memory[2].data = nullptr;
  expect({0}, no_memory, g, StatusCode::kInvalidArgument, "weights of layers.1.weight: no memory");
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    weights[5][7] = bad;
    expect({0}, w, g, StatusCode::kFailedPrecondition, "diverged or are damaged");
    EXPECT_THAT(Evaluate(Digits(), {0}, w), StatusIs(StatusCode::kFailedPrecondition, HasSubstr("diverged")));
  }
}

uint64_t HashOf(const Tensors& tensors) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const auto& tensor : tensors) {
    for (const float& value : tensor) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      hash = (hash ^ bits) * 0x100000001B3ull;
    }
  }
  return hash;
}

// The bits are part of the contract: a run can be compared with one on another machine, of another compiler or release.
TEST(Mlp, Gradients_HaveTheBitsTheyAlwaysHad) {
  const Tensors weights = Initial(kSeed);
  EXPECT_EQ(HashOf(weights), 16593262790376989800u);
  EXPECT_EQ(HashOf(StepGradient(1, weights)), 2315174902853252753u);
  EXPECT_EQ(HashOf(StepGradient(1, weights)), HashOf(StepGradient(1, weights)));
}

TEST(Mlp, PlainAdamW_LearnsTheDigits) {
  Tensors weights = Initial(kSeed);
  AdamW optimizer;
  const double start = Loss(weights, Digits().held_out());
  for (int step = 1; step <= 200; ++step) optimizer.Step(step, StepGradient(step, weights), weights);
  ASSERT_OK_AND_ASSIGN(const Evaluation end, Evaluate(Digits(), Digits().held_out(), Const(weights)));
  RecordProperty("held_out_accuracy", std::to_string(end.accuracy));
  std::printf("held-out: loss %.4f -> %.4f, accuracy %.4f after 200 steps\n", start, end.loss, end.accuracy);
  EXPECT_GT(start, 2.0);  // ln 10 = 2.303 when nothing is known
  EXPECT_GE(end.accuracy, 0.96);
}

}  // namespace
}  // namespace shardmesh::digits
