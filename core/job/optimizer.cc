#include "core/job/optimizer.h"

#include <algorithm>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/job/adamw.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kNames[] = {"sgd", "adam", "adamw", "lion", "muon"};

bool IsAdam(OptimizerKind kind) { return kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdamW; }

// `low <= value <= high`; false for NaN too.
absl::Status CheckRange(const OptimizerHyper& hyper, absl::string_view name, double value, double low, double high,
                        absl::string_view range) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(OptimizerName(hyper.kind), ": ", name, " is ", value, "; it must lie in ", range));
}

absl::Status CheckNesterov(const OptimizerHyper& hyper) {
  if (hyper.kind != OptimizerKind::kSgd || !hyper.nesterov || (hyper.momentum > 0 && hyper.dampening == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("sgd: nesterov with momentum ", hyper.momentum, " and dampening ",
                                                 hyper.dampening, "; it needs a momentum and no dampening"));
}

AdamWHyper AdamHyper(const OptimizerHyper& hyper) {
  const bool decoupled = hyper.kind == OptimizerKind::kAdamW;
  return {hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, decoupled ? hyper.weight_decay : 0};
}

}  // namespace

absl::string_view OptimizerName(OptimizerKind kind) { return kNames[static_cast<int>(kind)]; }

absl::StatusOr<OptimizerKind> ParseOptimizer(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (lower == kNames[i]) return static_cast<OptimizerKind>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat("optimizer \"", absl::CHexEscape(name.substr(0, 40)),
                                                 "\" is none; there are sgd, adam, adamw, lion and muon"));
}

OptimizerHyper OptimizerHyper::Defaults(OptimizerKind kind) {
  OptimizerHyper hyper;
  hyper.kind = kind;
  if (kind == OptimizerKind::kAdamW) hyper.weight_decay = 1e-2;
  if (kind == OptimizerKind::kLion) {
    hyper.lr = 1e-4;
    hyper.beta2 = 0.99;
  }
  if (kind == OptimizerKind::kMuon) {
    hyper.weight_decay = 0.1;
    hyper.momentum = 0.95;
    hyper.nesterov = true;
    hyper.eps = 1e-7;
  }
  return hyper;
}

int NumStates(const OptimizerHyper& hyper) {
  if (IsAdam(hyper.kind)) return hyper.amsgrad ? 3 : 2;
  return hyper.kind == OptimizerKind::kSgd && hyper.momentum == 0 ? 0 : 1;
}

absl::string_view StateName(const OptimizerHyper& hyper, int state) {
  constexpr absl::string_view kMoments[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  const bool buffer = hyper.kind == OptimizerKind::kSgd || hyper.kind == OptimizerKind::kMuon;
  return buffer ? "momentum_buffer" : kMoments[state];
}

bool StateIsSigned(const OptimizerHyper& hyper, int state) { return state == 0; }

absl::Status Validate(const OptimizerHyper& hyper) {
  constexpr double kInfinity = std::numeric_limits<double>::max();
  if (IsAdam(hyper.kind)) {
    RETURN_IF_ERROR(Annotate(Validate(AdamHyper(hyper)), OptimizerName(hyper.kind)));
    return CheckRange(hyper, "weight_decay", hyper.weight_decay, 0, kInfinity, "[0, infinity)");
  }
  RETURN_IF_ERROR(CheckRange(hyper, "lr", hyper.lr, 0, kMaxLearningRate, "[0, 1e6]"));
  RETURN_IF_ERROR(CheckRange(hyper, "weight_decay", hyper.weight_decay, 0, kInfinity, "[0, infinity)"));
  if (hyper.kind == OptimizerKind::kLion) {
    RETURN_IF_ERROR(CheckRange(hyper, "beta1", hyper.beta1, 0, 1, "[0, 1]"));
    RETURN_IF_ERROR(CheckRange(hyper, "beta2", hyper.beta2, 0, 1, "[0, 1]"));
  } else {
    RETURN_IF_ERROR(CheckRange(hyper, "momentum", hyper.momentum, 0, 1, "[0, 1]"));
    RETURN_IF_ERROR(CheckRange(hyper, "dampening", hyper.dampening, 0, 1, "[0, 1]"));
    RETURN_IF_ERROR(CheckNesterov(hyper));
  }
  if (hyper.kind == OptimizerKind::kSgd) return absl::OkStatus();
  return CheckRange(hyper, "lr * weight_decay", hyper.lr * hyper.weight_decay, 0, 1, "[0, 1]");
}

float ClipFactor(double max_norm, double norm) { return static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6))); }

absl::StatusOr<StepScalars> ComputeStepScalars(const OptimizerHyper& hyper, int64_t step) {
  RETURN_IF_ERROR(Validate(hyper));
  if (step < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(OptimizerName(hyper.kind), ": the step is ", step, "; the first step is 1"));
  }
  StepScalars scalars;
  scalars.gradient_sign = hyper.maximize ? -1.0f : 1.0f;
  scalars.neg_step_size = static_cast<float>(-hyper.lr);
  const bool coupled = hyper.kind == OptimizerKind::kSgd || hyper.kind == OptimizerKind::kAdam;
  if (coupled) {
    scalars.coupled_decay = static_cast<float>(hyper.weight_decay);
  } else {
    scalars.decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay);
  }
  if (IsAdam(hyper.kind)) {
    ASSIGN_OR_RETURN(const AdamWScalars adam, ComputeAdamWScalars(AdamHyper(hyper), step));
    scalars.neg_step_size = adam.neg_step_size;
    scalars.inv_sqrt_bias2 = adam.inv_sqrt_bias2;
    scalars.eps = adam.eps;
  }
  scalars.beta1 = static_cast<float>(hyper.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  scalars.beta2 = static_cast<float>(hyper.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  scalars.momentum = step == 1 ? 0.0f : static_cast<float>(hyper.momentum);
  scalars.one_minus_dampening = step == 1 ? 1.0f : static_cast<float>(1 - hyper.dampening);
  scalars.nesterov = static_cast<float>(hyper.momentum);
  return scalars;
}

}  // namespace shardmesh
