#include "core/job/adamw.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {

namespace {

// `low <= value <= high`; false for NaN too.
absl::Status CheckRange(absl::string_view name, double value, double low, double high, absl::string_view range) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("AdamW: ", name, " is ", value, "; it must lie in ", range));
}

// base^exponent by repeated squaring: multiplications only.
double IntegerPower(double base, int64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if (exponent & 1) power *= base;
  }
  return power;
}

}  // namespace

absl::Status Validate(const AdamWHyper& hyper) {
  const double below_one = std::nextafter(1.0, 0.0);
  RETURN_IF_ERROR(CheckRange("lr", hyper.lr, 0, kMaxLearningRate, "[0, 1e6]"));
  RETURN_IF_ERROR(CheckRange("beta1", hyper.beta1, 0, below_one, "[0, 1)"));
  RETURN_IF_ERROR(CheckRange("beta2", hyper.beta2, 0, below_one, "[0, 1)"));
  RETURN_IF_ERROR(CheckRange("eps", hyper.eps, std::numeric_limits<float>::min(), 1e6, "[1.2e-38, 1e6]"));
  RETURN_IF_ERROR(
      CheckRange("weight_decay", hyper.weight_decay, 0, std::numeric_limits<double>::max(), "[0, infinity)"));
  return CheckRange("lr * weight_decay", hyper.lr * hyper.weight_decay, 0, 1, "[0, 1]");
}

absl::StatusOr<AdamWScalars> ComputeAdamWScalars(const AdamWHyper& hyper, int64_t step) {
  RETURN_IF_ERROR(Validate(hyper));
  if (step < 1) return absl::InvalidArgumentError(absl::StrCat("AdamW: the step is ", step, "; the first step is 1"));
  const double bias1 = 1 - IntegerPower(hyper.beta1, step);
  const double bias2 = 1 - IntegerPower(hyper.beta2, step);
  AdamWScalars scalars;
  scalars.beta1 = static_cast<float>(hyper.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  scalars.beta2 = static_cast<float>(hyper.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  scalars.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(bias2));
  scalars.eps = static_cast<float>(hyper.eps);
  scalars.decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay);
  scalars.neg_step_size = static_cast<float>(-(hyper.lr / bias1));
  return scalars;
}

}  // namespace shardmesh
