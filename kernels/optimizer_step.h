// One optimizer step over a run of one tensor's elements, in any of the formats of core/format/numeric_formats.h: sums
// the slots' gradients in tree order, scales and clips them, moves states and weights on, rounds both to their formats
// and writes copies of the weights as readers get them.
//
// Two implementations, the same bits: the reference (plain C++, one element at a time) and SIMD (8 lanes, processors
// with AVX2 and FMA). Both walk tiles of 256 elements (kernels/tile/); the element rules are in kernels/rules/. Where
// blocks of a format (256 elements at most) begin is counted from the tensor's start, so results do not depend on how
// a tensor is cut into runs.
//
// Nothing is checked but by CheckRun: a caller that takes pointers and numbers from outside asks it first.
// Thread-safe for runs that share no output. Memory is borrowed for the call. The processor's floating-point
// environment is set for the call and restored (kernels/cpu/fp_environment.h).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "core/format/format.h"
#include "core/format/numeric_formats.h"
#include "core/job/optimizer.h"

namespace shardmesh {

// Runs begin and, but for the tensor's last, end at multiples of this many elements.
inline constexpr int64_t kStepAlignment = 256;
// Elements of one entry of OptimizerRun::largest.
inline constexpr int64_t kLargestElements = 128;

// The parts of a stored stream (core/format/numeric_formats.h), each at the run's first element.
struct StoredRun {
  void* codes = nullptr;
  void* extra = nullptr;  // remainder or scales; null where the format has none
};

struct OptimizerRun {
  const void* const* gradients = nullptr;  // [num_slots], in slot order, in the gradient format
  int num_slots = 0;                       // at least 1
  float divide_scale = 1;                  // the sum is multiplied by it: 1 / V rounded once to fp32
  float clip = 1;                          // and then by this: the factor of global-norm clipping

  // The outputs may be the inputs, or lie elsewhere (rotating storage); they never overlap in another way. Of the
  // states there are as many as the optimizer has.
  StoredRun weights_in, weights_out;
  StoredRun states_in[3], states_out[3];
  void* copies[2] = {nullptr, nullptr};  // the new codes, which readers get: fp32, bf16, or int8 beside its new scales
  int num_copies = 0;

  // What else a pass can tell; null: not asked for. The first two for each tile of 256 elements.
  float* square_sums = nullptr;  // the sum of squares of its gradient before clipping (kernels/tile/gradients.h)
  uint8_t* changed = nullptr;    // 1: the codes of its weights are others than before, 0: they are the same

  // The new weights as readers get them (int8_row: codes times scales) in mx8: codes, and as `extra` the E8M0 scale of
  // every 32 elements; what Encode (kernels/encode/encode.h) gives for them, for rows that are multiples of 32. The
  // codes of values that are not finite mean nothing.
  StoredRun mx8;
  // Of the same weights, for every 128 elements: the largest magnitude, beside which a NaN is none. After a MAX over
  // all of them, scales of fp8_tensor and, where rows are multiples of 128, of fp8_row, fp8_block and int8_row follow.
  float* largest = nullptr;
  // [1 + states]: the digests (core/format/stream_digest.h) of the new weights, codes and extra, and of each new state
  // are added to these, modulo 2^64 and atomically: runs of one tensor may share them.
  uint64_t* digests = nullptr;

  int64_t num_elements = 0;    // 0 does nothing
  uint64_t first_element = 0;  // the run's first index in its tensor, a multiple of kStepAlignment
  uint32_t tensor = 0;         // the tensor's number in the job, for its draws
  int64_t row_elements = 0;    // of int8_row alone; runs are then whole rows
};

// What all runs of a step share.
struct OptimizerContext {
  OptimizerHyper hyper;
  StepScalars scalars;  // of hyper and step
  WeightFormat weights = WeightFormat::kFp32;
  StateFormat states = StateFormat::kFp32;
  Format gradients = Format::kFp32;  // kFp32 or kBf16
  uint64_t seed = 0;                 // the job's
  int64_t step = 1;
};

// InvalidArgument: Muon (which steps whole matrices: kernels/muon/muon.h); a format that the optimizer cannot have; a
// negative length, mx8 of no multiple of 32 elements, a first element that is no multiple of kStepAlignment, no slot; a
// pointer that is null or not aligned to its elements; outputs that overlap each other, or an input other than their
// own.
absl::Status CheckRun(const OptimizerContext& context, const OptimizerRun& run);

using OptimizerStepFn = void (*)(const OptimizerContext& context, const OptimizerRun& run);

void OptimizerStepReference(const OptimizerContext& context, const OptimizerRun& run);
// REQUIRES: SimdSupported() (kernels/cpu/processor.h).
void OptimizerStepSimd(const OptimizerContext& context, const OptimizerRun& run);
// SIMD where it is supported, else the reference.
OptimizerStepFn BestOptimizerStep();

// OptimizerRun::square_sums alone, with the bits that a step tells: what the norm of all gradients is made of before
// they are clipped. Of the run, gradients, num_slots, divide_scale, square_sums and num_elements are read.
void GradientSquaresReference(const OptimizerContext& context, const OptimizerRun& run);
// REQUIRES: SimdSupported().
void GradientSquaresSimd(const OptimizerContext& context, const OptimizerRun& run);
OptimizerStepFn BestGradientSquares();

}  // namespace shardmesh
