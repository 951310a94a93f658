// One step of torchao's Adam and AdamW over a run: with the formats dyn8, dyn4, fp8 and fp32 what torchao.optim's
// Adam(W)8bit, Adam(W)4bit, Adam(W)Fp8 and _AdamW do on a CPU, bit for bit in codes, scales and weights. For
// checkpoints that go to and fro, and to take over a training run; the project's own step (kernels/optimizer_step.h) is
// faster and keeps small second moments.
//
// Source: torchao 0.18, optim/adam.py, single_param_adam, in fp32 and in its order:
//   AdamW: w = w - (lr wd) w                   Adam: g = g + wd w
//   m' = lerp(m, g, 1 - beta1)                 v' = lerp(v, g g, 1 - beta2)         AMSGrad: v' = max(vmax, v')
//   w' = w - lr (m' / bias1) / (sqrt(v') / sqrt(bias2) + eps)                       bias = 1 - powf(beta, step)
// m' and v' are used as they are, before they become codes. How codes come to be: kernels/encode/torchao_codec.h.
//
// Where it is not torchao: bf16_sr weights take this project's draws (theirs come from a generator that has a state);
// fp32 states beside bf16 weights stay fp32, while torchao keeps the states of its small tensors in bf16; AMSGrad with
// states in codes follows the formula, which torchao 0.18 refuses to run (it has no maximum of such states). Weights
// depend on the C library's powf, as torch's do, and so do Adam's codes through a coupled weight decay; other codes and
// scales do not. Eager torch takes square roots with a library that is off by a unit in the last place now and then
// (about 1 % of fp32 weights). torch on a GPU multiplies and adds otherwise.
// Which tensors have codes is the caller's choice: torchao's are those of 4096 elements or more, in whole blocks.
//
// One element at a time, a mode for compatibility. Thread-safe for runs that share no output; memory is borrowed.
#pragma once

#include "absl/status/status.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {

// A lerp adds its product in two roundings where torch compiles the step, as torchao's optimizers have it done, and in
// one where single_param_adam is called as it stands.
enum class TorchaoArithmetic { kCompiled, kEager };

// InvalidArgument: an optimizer other than Adam and AdamW, maximize, weights other than fp32, bf16 and bf16_sr, states
// that torchao does not have, a run that does not end with a block of its states, a step below 1, or as CheckRun.
absl::Status CheckTorchaoRun(const OptimizerContext& context, const OptimizerRun& run);

// REQUIRES: CheckTorchaoRun is OK. The context's scalars may stay unset: torchao rounds its own in another way.
void TorchaoStep(const OptimizerContext& context, const OptimizerRun& run, TorchaoArithmetic arithmetic);
// As compiled. An OptimizerStepFn.
void TorchaoStep(const OptimizerContext& context, const OptimizerRun& run);

}  // namespace shardmesh
