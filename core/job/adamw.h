// AdamW's hyper-parameters, and the eight fp32 numbers of one step that the kernels use. Pure functions, thread-safe.
//
// The update as torch.optim.AdamW defines it (Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019),
// at step t >= 1, for a gradient g already divided by its number of contributions:
//
//   p = p * (1 - lr * weight_decay)
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Kernels know no power, exponential or logarithm: what depends on t alone is computed here, once per step, in double,
// powers by repeated squaring (no libm, so every machine gets the same bits), and rounded once to fp32. A step is
// recorded and replayed with these bits. Order of the operations per element: kernels/rules/adamw.h.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardmesh {

struct AdamWHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

struct AdamWScalars {
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float inv_sqrt_bias2 = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float decay = 0;          // 1 - lr * weight_decay
  float neg_step_size = 0;  // -lr / (1 - beta1^t)
};

// The largest learning rate that is accepted; so no scalar of a step can overflow fp32.
constexpr double kMaxLearningRate = 1e6;

// kInvalidArgument, naming the field, its value and the accepted range:
//   lr not in [0, 1e6]; beta1 or beta2 not in [0, 1); weight_decay negative or not finite;
//   eps not in [1.2e-38, 1e6] (a normal fp32 number, so that 0 / (0 + eps) is 0 and not NaN);
//   lr * weight_decay above 1 (the decay would turn the weights' signs round).
absl::Status Validate(const AdamWHyper& hyper);

// The scalars of step `step`. kInvalidArgument: as Validate, or step < 1.
absl::StatusOr<AdamWScalars> ComputeAdamWScalars(const AdamWHyper& hyper, int64_t step);

}  // namespace shardmesh
