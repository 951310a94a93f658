#include "core/job/adamw.h"

#include <cmath>
#include <limits>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr AdamWHyper kHyper{3e-4, 0.9, 0.95, 1e-7, 0.1};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(AdamWTest, ScalarsEqualTheFormulaInLongDouble) {
  for (int64_t step : {1, 2, 3, 10, 1000, 123457}) {
    ASSERT_OK_AND_ASSIGN(AdamWScalars s, ComputeAdamWScalars(kHyper, step));
    const auto bias = [&](double beta) { return 1 - std::pow(static_cast<long double>(beta), step); };
    EXPECT_EQ(s.beta1, 0.9f);
    EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1 - 0.9));
    EXPECT_EQ(s.beta2, 0.95f);
    EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1 - 0.95));
    EXPECT_EQ(s.eps, 1e-7f);
    EXPECT_FLOAT_EQ(s.decay, static_cast<float>(1 - 3e-4 * 0.1));
    EXPECT_FLOAT_EQ(s.inv_sqrt_bias2, static_cast<float>(1 / std::sqrt(bias(0.95))));
    EXPECT_FLOAT_EQ(s.neg_step_size, static_cast<float>(-3e-4 / bias(0.9)));
  }
}

// After very many steps the powers vanish; nothing overflows, and the corrections are exactly one.
TEST(AdamWTest, CorrectionsVanishAfterManySteps) {
  ASSERT_OK_AND_ASSIGN(AdamWScalars s, ComputeAdamWScalars(kHyper, std::numeric_limits<int64_t>::max()));
  EXPECT_EQ(s.inv_sqrt_bias2, 1.0f);
  EXPECT_EQ(s.neg_step_size, -3e-4f);
}

TEST(AdamWTest, ExtremesOfTheAcceptedRangeGiveFiniteScalars) {
  const double near_one = std::nextafter(1.0, 0.0);
  for (double lr : {0.0, 1e6}) {
    for (double beta : {0.0, near_one}) {
      for (double eps : {1.2e-38, 1e6}) {
        ASSERT_OK_AND_ASSIGN(AdamWScalars s, ComputeAdamWScalars({lr, beta, beta, eps, 1e-6}, 1));
        for (float x : {s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.inv_sqrt_bias2, s.eps, s.decay,
                        s.neg_step_size}) {
          EXPECT_TRUE(std::isfinite(x)) << lr << " " << beta << " " << eps;
        }
        EXPECT_GT(s.eps, 0);
      }
    }
  }
}

TEST(AdamWTest, BadValue_ErrorNamesTheFieldAndTheRange) {
  struct Case {
    AdamWHyper hyper;
    const char* field;
  };
  const Case cases[] = {
      {{-1e-3, 0.9, 0.9, 1e-8, 0}, "lr is -0.001"},
      {{kNan, 0.9, 0.9, 1e-8, 0}, "lr is nan"},
      {{2e6, 0.9, 0.9, 1e-8, 0}, "[0, 1e6]"},
      {{1e-3, 1.0, 0.9, 1e-8, 0}, "beta1 is 1; it must lie in [0, 1)"},
      {{1e-3, -0.1, 0.9, 1e-8, 0}, "beta1"},
      {{1e-3, 0.9, 1.5, 1e-8, 0}, "beta2"},
      {{1e-3, 0.9, 1.0, 1e-8, 0}, "beta2 is 1; it must lie in [0, 1)"},
      {{1e-3, 0.9, kNan, 1e-8, 0}, "beta2"},
      {{1e-3, 0.9, 0.9, 0, 0}, "eps is 0"},
      {{1e-3, 0.9, 0.9, 1e-40, 0}, "eps"},
      {{1e-3, 0.9, 0.9, kInf, 0}, "eps"},
      {{1e-3, 0.9, 0.9, 1e-8, -1}, "weight_decay"},
      {{1e-3, 0.9, 0.9, 1e-8, kInf}, "weight_decay is inf"},
      {{1, 0.9, 0.9, 1e-8, 2}, "lr * weight_decay is 2"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(Validate(c.hyper), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.field)));
    EXPECT_THAT(ComputeAdamWScalars(c.hyper, 1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.field)));
  }
  EXPECT_OK(Validate(AdamWHyper()));
}

TEST(AdamWTest, StepBelowOne_IsAnError) {
  for (int64_t step : {int64_t{0}, std::numeric_limits<int64_t>::min()}) {
    EXPECT_THAT(ComputeAdamWScalars(kHyper, step),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the first step is 1")));
  }
}

}  // namespace
}  // namespace shardmesh
