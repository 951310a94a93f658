// Moving averages in each format of states: second moments have to follow what they average, however slowly it moves.
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "core/base/matchers.h"
#include "gtest/gtest.h"
#include "kernels/encode/encode.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {
namespace {

constexpr int64_t kElements = 1024;
constexpr double kSlow = 0.999;

// AdamW in one format of states, with gradients of a normal distribution.
class Average {
 public:
  explicit Average(StateFormat format) : format_(format), layout_(LayoutOf(format)) {
    context_.hyper = OptimizerHyper::Defaults(OptimizerKind::kAdamW);
    context_.hyper.beta2 = kSlow;
    context_.states = format;
    for (auto& state : states_) {
      state[0].resize(layout_.codes.BytesOf(kElements) / 4);
      state[1].resize(layout_.extra.BytesOf(kElements) / 4 + 1);
    }
  }

  // `deviation`: of the gradients; 0 takes none.
  void Step(int steps, float deviation) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < steps; ++i) {
      for (float& g : gradient_) g = deviation == 0 ? 0 : deviation * normal(random_);
      context_.step = ++step_;
      context_.scalars = *ComputeStepScalars(context_.hyper, step_);
      const void* slots[] = {gradient_.data()};
      OptimizerRun run;
      run.gradients = slots;
      run.num_slots = 1;
      run.weights_in = run.weights_out = {weights_.data(), nullptr};
      for (int s = 0; s < 2; ++s) run.states_in[s] = run.states_out[s] = {states_[s][0].data(), states_[s][1].data()};
      run.num_elements = kElements;
      ASSERT_OK(CheckRun(context_, run));
      BestOptimizerStep()(context_, run);
    }
  }

  double MeanSecondMoment() const {
    CodeSpec spec;
    spec.format = CodeFormatOf(format_);
    spec.is_signed = false;
    std::vector<const void*> parts = {states_[1][0].data()};
    if (layout_.extra.bytes > 0) parts.push_back(states_[1][1].data());
    std::vector<float> values(kElements);
    EXPECT_OK(Decode(spec, {kElements}, parts, values.data()));
    double sum = 0;
    for (const float value : values) sum += value;
    return sum / kElements;
  }

 private:
  const StateFormat format_;
  const StoredLayout layout_;
  OptimizerContext context_;
  int64_t step_ = 0;
  std::mt19937_64 random_{1};
  std::vector<float> weights_ = std::vector<float>(kElements), gradient_ = std::vector<float>(kElements);
  std::vector<uint32_t> states_[2][2];
};

// dyn4 and fp8, whose codes are torchao's, are not here: they round to the nearest of levels too far from each other.
constexpr StateFormat kFollow[] = {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kFp8x32};

// How far the mean of kElements averages may be from what they average. Gradients alone: a relative deviation of
// sqrt(2 (1 - beta2) / (1 + beta2) / kElements) = 0.1 %. Stochastic rounding between levels of a relative distance d
// adds a variance of about (1 - beta2) d a step, over as many as 2,000: with d = 1/192 (bf16) 0.3 %, with 1/12 (fp8x32)
// 1.3 % of a mean. Five deviations. dyn8 rounds to the nearest of levels that are up to 14 % apart: half of that.
double Tolerance(StateFormat format) {
  return format == StateFormat::kDyn8 || format == StateFormat::kFp8x32 ? 0.07 : 0.016;
}

TEST(Averages, OfGradientsOfOneSize_AreThatSize) {
  for (const StateFormat format : kFollow) {
    Average average(format);
    average.Step(2000, 1);
    const double right = 1 - std::pow(kSlow, 2000);
    EXPECT_NEAR(average.MeanSecondMoment() / right, 1, Tolerance(format)) << StateFormatName(format);
  }
}

TEST(Averages, WithoutGradients_FadeAsFastAsTheyShould) {
  for (const StateFormat format : kFollow) {
    Average average(format);
    average.Step(1, 1);
    const double before = average.MeanSecondMoment();
    average.Step(2000, 0);
    EXPECT_NEAR(average.MeanSecondMoment() / before / std::pow(kSlow, 2000), 1, Tolerance(format))
        << StateFormatName(format);
  }
}

TEST(Averages, AfterGradientsShrink_Follow) {
  for (const StateFormat format : kFollow) {
    Average average(format);
    average.Step(200, 1);
    average.Step(6000, 1.0f / 16);
    const double first = 1 - std::pow(kSlow, 200), rest = std::pow(kSlow, 6000);
    EXPECT_NEAR(average.MeanSecondMoment() / (first * rest + (1 - rest) / 256), 1, Tolerance(format))
        << StateFormatName(format);
  }
}

}  // namespace
}  // namespace shardmesh
