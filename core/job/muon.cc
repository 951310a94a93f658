#include "core/job/muon.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

absl::Status Check(const OptimizerHyper& hyper, const MuonOptions& options, int64_t rows, int64_t columns) {
  RETURN_IF_ERROR(Validate(hyper));
  if (hyper.kind != OptimizerKind::kMuon) {
    return absl::InvalidArgumentError(absl::StrCat("the optimizer is ", OptimizerName(hyper.kind), ", not muon"));
  }
  if (!(hyper.eps >= std::numeric_limits<float>::min() && hyper.eps <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("muon: eps is ", hyper.eps, "; it must lie in [1.2e-38, 1e6]"));
  }
  for (const double coefficient : {options.a, options.b, options.c}) {
    if (std::abs(coefficient) <= std::numeric_limits<float>::max()) continue;
    return absl::InvalidArgumentError(absl::StrCat("muon: ns_coefficients are ", options.a, ", ", options.b, " and ",
                                                   options.c, "; they must be finite fp32 numbers"));
  }
  if (options.iterations < 0 || options.iterations > 99) {
    return absl::InvalidArgumentError(
        absl::StrCat("muon: ns_steps is ", options.iterations, "; it must lie in [0, 99]"));
  }
  if (rows < 1 || columns < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("muon: a matrix of ", rows, " rows and ", columns, " columns; there is at least one of each"));
  }
  return absl::OkStatus();
}

double LrRatio(MuonLrAdjust adjust, double rows, double columns) {
  if (adjust == MuonLrAdjust::kMatchRmsAdamW) return 0.2 * std::sqrt(std::max(rows, columns));
  return std::sqrt(std::max(1.0, rows / columns));
}

}  // namespace

LerpScalars MakeLerp(double weight) {
  const float rounded = static_cast<float>(weight);
  if (rounded < 0.5f) return {rounded, false};
  return {rounded - 1.0f, true};
}

absl::StatusOr<MuonScalars> ComputeMuonScalars(const OptimizerHyper& hyper, const MuonOptions& options, int64_t rows,
                                               int64_t columns) {
  RETURN_IF_ERROR(Check(hyper, options, rows, columns));
  const double ratio = LrRatio(options.lr_adjust, static_cast<double>(rows), static_cast<double>(columns));
  MuonScalars scalars;
  scalars.buffer = MakeLerp(1 - hyper.momentum);
  scalars.nesterov = MakeLerp(hyper.momentum);
  scalars.is_nesterov = hyper.nesterov;
  scalars.eps = static_cast<float>(hyper.eps);
  scalars.a = static_cast<float>(options.a);
  scalars.b = static_cast<float>(options.b);
  scalars.c = static_cast<float>(options.c);
  scalars.iterations = options.iterations;
  scalars.decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay);
  scalars.neg_step_size = static_cast<float>(-(hyper.lr * ratio));
  return scalars;
}

}  // namespace shardmesh
