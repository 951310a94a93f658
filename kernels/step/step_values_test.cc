#include "kernels/step/step_values.h"

#include <cfloat>
#include <limits>
#include <vector>

#include "core/base/matchers.h"
#include "core/format/format.h"
#include "gtest/gtest.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kElements = 300;

// A step of Adam with dyn8 states, where everything is right.
struct RunOfTwo {
  RunOfTwo() : weights(kElements), gradients(2, std::vector<float>(kElements, 1.0f)), scales(2, {0.5f, 0.5f}) {
    context.hyper = OptimizerHyper::Defaults(OptimizerKind::kAdam);
    context.states = StateFormat::kDyn8;
    for (auto& slot : gradients) slots.push_back(slot.data());
    run.gradients = slots.data();
    run.num_slots = 2;
    run.num_elements = kElements;
    run.weights_in = run.weights_out = {weights.data()};
    for (int s = 0; s < 2; ++s) run.states_in[s] = run.states_out[s] = {codes[s], scales[s].data()};
  }
  std::string Error(bool zero_scales = false) const {
    return std::string(CheckStepValues(context, run, zero_scales).message());
  }

  OptimizerContext context;
  OptimizerRun run;
  std::vector<float> weights;
  std::vector<std::vector<float>> gradients, scales;
  std::vector<const void*> slots;
  uint8_t codes[2][kElements] = {};
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(StepValues, RightOnes_AreAccepted) {
  const RunOfTwo two;
  EXPECT_OK(CheckRun(two.context, two.run));
  EXPECT_OK(CheckStepValues(two.context, two.run));
  EXPECT_FALSE(FindRefusedGradient(two.context, two.run).has_value());
}

TEST(StepValues, Scales_AreFiniteAndAbove0) {
  for (const float bad : {kNan, kInfinity, -kInfinity, -1.0f, 0.0f, -0.0f}) {
    RunOfTwo two;
    two.scales[1][1] = bad;
    EXPECT_THAT(two.Error(), HasSubstr("exp_avg_sq: scale 1 is ")) << bad;
    EXPECT_EQ(two.Error(true).empty(), bad == 0) << bad;
  }
}

TEST(StepValues, ScalesOfFp8_GiveFiniteNumbers) {
  RunOfTwo two;
  two.scales[1][1] = 0x1p120f;
  EXPECT_EQ(two.Error(), "");
  two.context.states = StateFormat::kFp8;
  EXPECT_THAT(two.Error(), HasSubstr("exp_avg_sq: scale 1 is 1.32923e+36; scales are above 0 and below 1.32923e+36"));
  two.scales[1][1] = std::nextafter(0x1p120f, 0.0f);
  EXPECT_EQ(two.Error(), "");
}

TEST(StepValues, ClipAndDivide_AreFinite) {
  for (const float bad : {kNan, kInfinity, -1.0f}) {
    RunOfTwo two;
    two.run.clip = bad;
    EXPECT_THAT(two.Error(), HasSubstr("clip is ")) << bad;
    two.run.clip = 0;
    two.run.divide_scale = bad;
    EXPECT_THAT(two.Error(), HasSubstr("multiplied by ")) << bad;
  }
}

TEST(StepValues, TheFirstRefusedGradient_IsFound) {
  for (const float bad : {kNan, kInfinity, -kInfinity, FLT_MAX, -FLT_MAX / 2}) {
    RunOfTwo two;
    two.gradients[1][299] = bad;
    const auto found = FindRefusedGradient(two.context, two.run);
    ASSERT_TRUE(found.has_value()) << bad;
    EXPECT_EQ(found->slot, 1);
    EXPECT_EQ(found->element, 299);
    EXPECT_EQ(FloatBits(found->value), FloatBits(bad));
  }
}

TEST(StepValues, RefusedBf16_HasItsValue) {
  RunOfTwo two;
  std::vector<uint16_t> slot(kElements, 0x3F80);
  slot[7] = 0xFF80;
  two.slots = {slot.data(), slot.data()};
  two.context.gradients = Format::kBf16;
  const auto found = FindRefusedGradient(two.context, two.run);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->slot, 0);
  EXPECT_EQ(found->element, 7);
  EXPECT_EQ(found->value, -kInfinity);
}

}  // namespace
}  // namespace shardmesh
