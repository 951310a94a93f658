// Optimizers, their hyper-parameters, and the fp32 numbers of one step that the kernels use. Pure functions,
// thread-safe.
//
// Names, defaults and formulas are torch.optim's (2.13); Lion's are its paper's (Chen et al., 2023). Kernels know no
// power, exponential or logarithm: what depends on the step alone is computed here, once per step, in double, powers by
// repeated squaring (no libm, so every machine gets the same bits), and rounded once to fp32. A step is recorded and
// replayed with these bits. Order of the operations per element: kernels/rules/optimizers.h.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/job/adamw.h"

namespace shardmesh {

// Adam and AdamW differ in where the weight decay goes: into the gradient (coupled), or onto the weight (decoupled).
enum class OptimizerKind { kSgd, kAdam, kAdamW, kLion, kMuon };

// "sgd", "adam", "adamw", "lion", "muon".
absl::string_view OptimizerName(OptimizerKind kind);
// InvalidArgument: no such optimizer; the message lists them. Upper and lower case are the same.
absl::StatusOr<OptimizerKind> ParseOptimizer(absl::string_view name);

struct OptimizerHyper {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 1e-3;
  double weight_decay = 0;
  bool maximize = false;
  // Adam, AdamW, Lion.
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;     // not Lion
  bool amsgrad = false;  // Adam, AdamW
  // SGD; momentum and nesterov also Muon.
  double momentum = 0, dampening = 0;
  bool nesterov = false;

  // torch.optim's defaults (Lion: lr 1e-4, betas 0.9 and 0.99).
  static OptimizerHyper Defaults(OptimizerKind kind);
};

// How many states an element has: 0 (SGD without momentum) to 3 (AMSGrad), and what torch calls them: momentum_buffer;
// exp_avg, exp_avg_sq, max_exp_avg_sq.
int NumStates(const OptimizerHyper& hyper);
absl::string_view StateName(const OptimizerHyper& hyper, int state);
// Second moments are never negative.
bool StateIsSigned(const OptimizerHyper& hyper, int state);

// Beside AdamW's, which other optimizers use as they need them: decay is what the weight is multiplied by (1: nothing),
// neg_step_size -lr where there is no bias correction.
struct StepScalars : AdamWScalars {
  StepScalars() { decay = 1; }
  float gradient_sign = 1;                      // -1: maximize
  float coupled_decay = 0;                      // added to the gradient: this times the weight
  float momentum = 0, one_minus_dampening = 0;  // 0 and 1 at the first step: the buffer becomes the gradient
  float nesterov = 0;                           // the momentum, also at the first step
};

// InvalidArgument, naming the field, its value and the accepted range:
//   lr not in [0, 1e6]; a beta not in [0, 1); momentum or dampening not in [0, 1]; weight_decay negative or not finite;
//   eps not in [1.2e-38, 1e6] (a normal fp32 number, so that 0 / (0 + eps) is 0 and not NaN); lr * weight_decay above 1
//   where the decay is decoupled; nesterov without momentum or with dampening (SGD).
absl::Status Validate(const OptimizerHyper& hyper);

// What gradients of that norm are multiplied by so that their norm is at most max_norm:
// torch.nn.utils.clip_grad_norm_'s min(1, max_norm / (norm + 1e-6)), rounded once to fp32. 0 for an infinite norm.
// REQUIRES: neither is negative or NaN.
float ClipFactor(double max_norm, double norm);

// The scalars of step `step`, 1 being the first. InvalidArgument: as Validate, or step < 1.
absl::StatusOr<StepScalars> ComputeStepScalars(const OptimizerHyper& hyper, int64_t step);

}  // namespace shardmesh
