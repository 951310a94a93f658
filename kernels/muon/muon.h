// The Muon step of one whole matrix at its owner, in any of the formats of core/format/numeric_formats.h but int8_row.
//
//   g = the slots' gradients, summed in tree order, scaled and clipped        (as kernels/optimizer_step.h)
//   B' = lerp(B, g, 1 - momentum);   U = lerp(g, B', momentum) with Nesterov, else B'
//   X = U / max(|U|, eps), transposed where there are more rows than columns;  O = NewtonSchulz(X), transposed back
//   W' = fma(-lr', O, decay W)
//
// Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; formulas and defaults are
// torch.optim.Muon's (2.13), but where that iterates in bf16, here everything is fp32. B' enters U before it is rounded
// to its format. The buffer is 0 before the first step.
//
// One order of operations, so the same bits on any number of threads: products as in kernels/muon/gemm.h, and |U| is
// the square root of a tree sum (core/base/reduction.h) over 256 elements a leaf; within a leaf 8 sums take every
// eighth element each, fma(u, u, sum) from +0, and are added as a tree. Squares that overflow fp32 (|U| above 1.8e19)
// make O 0; a NaN in the gradients makes all of O NaN. A zero U leaves O zero.
//
// Two implementations, the same bits: the reference (plain loops) and SIMD. Nothing is checked but by CheckMuon.
// Thread-safe for runs that share no output and no scratch. Memory is borrowed for the call; the scratch has all that
// grows with the matrix.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/job/muon.h"
#include "kernels/cpu/parallel.h"
#include "kernels/muon/gemm.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {

struct MuonMatrix {
  int64_t rows = 0, columns = 0;
  MuonScalars scalars;  // of the hyper-parameters and this shape
};

// What the steps of some matrices, one at a time, need of memory.
struct MuonSpace {
  int64_t elements = 0;  // of the largest, in whole tiles
  int64_t square = 0;    // of the longest short side

  void Include(int64_t rows, int64_t columns);
  // 8 bytes an element, 8 for each square of the short side, and 4 for each tile of 256 elements.
  int64_t num_bytes() const;
};

// Memory that steps work in, one step at a time: MuonSpace, and 586 KiB a part. Its contents mean nothing between
// steps.
class MuonScratch {
 public:
  // `parts`: as the Parallel of the steps has. Its memory is its own, and there is none yet.
  explicit MuonScratch(int parts) : gemm_(parts) {}
  // In memory of the caller's, which outlives it: space.num_bytes() at `memory`.
  MuonScratch(int parts, const MuonSpace& space, float* memory) : space_(space), gemm_(parts) { PlaceIn(memory); }
  MuonScratch(const MuonScratch&) = delete;
  MuonScratch& operator=(const MuonScratch&) = delete;

  // Makes room for a matrix of this shape, beside those before. REQUIRES: the memory is its own.
  void Reserve(int64_t rows, int64_t columns);
  bool Fits(int64_t rows, int64_t columns, int parts) const;

  // Where a step with these scalars leaves the orthogonalized update, row-major.
  const float* update(const MuonScalars& scalars) const { return matrices_[scalars.iterations % 2]; }

 private:
  friend class MuonRun;
  void PlaceIn(float* memory);

  MuonSpace space_;
  std::vector<float> own_;
  float *matrices_[2] = {}, *squares_[2] = {};
  float* sums_ = nullptr;  // of each tile's squares
  std::vector<GemmScratch> gemm_;
};

// InvalidArgument: the context's optimizer is not Muon; weights are int8_row; the run is not the whole matrix (its
// elements are rows x columns, from 0 on); the scratch is too small; or as CheckRun, of a run with one state.
absl::Status CheckMuon(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                       const MuonScratch& scratch, const Parallel& parallel);

using MuonStepFn = void (*)(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                            MuonScratch& scratch, const Parallel& parallel);

void MuonStepReference(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                       MuonScratch& scratch, const Parallel& parallel);
// REQUIRES: SimdSupported() (kernels/cpu/processor.h).
void MuonStepSimd(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                  MuonScratch& scratch, const Parallel& parallel);
// SIMD where it is supported, else the reference.
MuonStepFn BestMuonStep();

// The same step in two parts, for who must be able to do the second again from where it was left: the bits of a whole
// one.
//   1: makes the update O, which lies at scratch.update() until the scratch is used again. What the step writes is not
//      looked at. REQUIRES: as a step.
void MuonUpdate(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                MuonScratch& scratch, const Parallel& parallel);
//   2: moves a run of the matrix on, by the update of its elements: momentum and weights, and what else a run tells.
//      Runs begin at multiples of kStepAlignment. Thread-safe for runs that share no output.
void MuonApply(const OptimizerContext& context, const MuonScalars& scalars, const OptimizerRun& run,
               const float* update);
// The fast mode, which nobody gets without asking: the products by the machine's BLAS (kernels/muon/blas.h) on its
// threads, everything else as above. The new momentum has the same bits; the new weights are close to the exact mode's,
// with bits that depend on that library. REQUIRES of the step: sides below 2^31.
//   FailedPrecondition: there is no BLAS; the message has what was tried.
absl::StatusOr<MuonStepFn> FastMuonStep();

}  // namespace shardmesh
