// Muon's own numbers: what one matrix's step needs beside core/job/optimizer.h. Pure functions, thread-safe.
//
// Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; names, defaults and formulas are
// torch.optim.Muon's (2.13). As there, numbers of one step are computed in double and rounded once to fp32 (square
// roots are exact IEEE operations), so every machine gets the same bits. The step itself: kernels/muon/muon.h.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/job/optimizer.h"

namespace shardmesh {

// What the learning rate of an A x B matrix is multiplied by.
enum class MuonLrAdjust {
  kOriginal,       // sqrt(max(1, A / B))
  kMatchRmsAdamW,  // 0.2 sqrt(max(A, B)): Liu et al., "Muon is scalable for LLM training", 2025
};

struct MuonOptions {
  double a = 3.4445, b = -4.7750, c = 2.0315;  // the polynomial of an iteration
  int iterations = 5;
  MuonLrAdjust lr_adjust = MuonLrAdjust::kOriginal;
};

// start + weight (end - start), from the nearer end: fma(coefficient, end - start, from_end ? end : start).
struct LerpScalars {
  float coefficient = 0;
  bool from_end = false;
};
LerpScalars MakeLerp(double weight);

struct MuonScalars {
  LerpScalars buffer;       // from the buffer to the gradient, by 1 - momentum
  LerpScalars nesterov;     // from the gradient to the new buffer, by the momentum
  bool is_nesterov = true;  // else the update is the new buffer
  float eps = 0;            // the norm is at least this
  float a = 0, b = 0, c = 0;
  int iterations = 0;
  float decay = 1;          // the weight is multiplied by it: 1 - lr weight_decay
  float neg_step_size = 0;  // -lr, adjusted
};

// The scalars of an A x B matrix (A rows); they are the same at every step.
// InvalidArgument, naming the field: `hyper` is not Muon's or not valid; eps not in [1.2e-38, 1e6] (then a zero matrix
// over it is 0 and not NaN); a coefficient not a finite fp32 number; iterations not in [0, 99];
// less than one row or column.
absl::StatusOr<MuonScalars> ComputeMuonScalars(const OptimizerHyper& hyper, const MuonOptions& options, int64_t rows,
                                               int64_t columns);

}  // namespace shardmesh
