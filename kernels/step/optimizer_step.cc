// The choice between the implementations, and the check of a run; compiled for any processor.
#include "kernels/optimizer_step.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "kernels/cpu/fp_environment.h"
#include "kernels/cpu/processor.h"
#include "kernels/step/optimizer_step_simd.h"
#include "kernels/tile/plan.h"

namespace shardmesh {
namespace {

// A stretch of memory that a run reads or writes.
struct Stretch {
  const char* name;
  uintptr_t begin, end;
  bool written;
};

class Streams {
 public:
  // InvalidArgument: null, or not aligned to `alignment`.
  absl::Status Add(const char* name, const void* data, int64_t bytes, int64_t alignment, bool written) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (bytes == 0) return absl::OkStatus();
    if (data == nullptr) return absl::InvalidArgumentError(absl::StrCat(name, " is null; it has ", bytes, " bytes"));
    if (begin % alignment != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " begins at address ", begin, "; it must be a multiple of ", alignment));
    }
    stretches_.push_back({name, begin, begin + bytes, written});
    return absl::OkStatus();
  }

  absl::Status AddStored(const char* name, const StoredRun& run, const StoredLayout& layout, int64_t elements,
                         bool written) {
    // Codes of several bytes are one number; scales are floats, remainders as wide as they are.
    const int64_t codes = layout.codes.elements == 1 ? layout.codes.bytes : 1;
    RETURN_IF_ERROR(Add(name, run.codes, layout.codes.BytesOf(elements), codes, written));
    return Add(name, run.extra, layout.extra.BytesOf(elements), std::max<int64_t>(layout.extra.bytes, 1), written);
  }

  // InvalidArgument: something written overlaps something else, but for an output that is its input (the same begin).
  absl::Status CheckOverlap() const {
    for (size_t i = 0; i < stretches_.size(); ++i) {
      for (size_t j = i + 1; j < stretches_.size(); ++j) {
        const Stretch &a = stretches_[i], &b = stretches_[j];
        if ((!a.written && !b.written) || a.end <= b.begin || b.end <= a.begin) continue;
        if (a.written != b.written && a.begin == b.begin && a.end == b.end && a.name == b.name) continue;
        return absl::InvalidArgumentError(absl::StrCat(a.name, " and ", b.name, " overlap; give each its own memory"));
      }
    }
    return absl::OkStatus();
  }

 private:
  std::vector<Stretch> stretches_;
};

absl::Status CheckNumbers(const OptimizerContext& context, const OptimizerRun& run) {
  if (context.hyper.kind == OptimizerKind::kMuon) {
    return absl::InvalidArgumentError("muon steps whole matrices, not runs of elements");
  }
  if (context.weights == WeightFormat::kNf4) {
    return absl::InvalidArgumentError("no step writes nf4 weights: they are frozen; take int8_row or another format");
  }
  if (run.num_elements < 0) {
    return absl::InvalidArgumentError(absl::StrCat("a run of ", run.num_elements, " elements; 0 is the least"));
  }
  if (run.num_slots < 1) {
    return absl::InvalidArgumentError(absl::StrCat(run.num_slots, " gradient slots; there is at least one"));
  }
  if (run.first_element % kStepAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a run begins at element ", run.first_element, "; it must be a multiple of ", kStepAlignment));
  }
  if (context.weights == WeightFormat::kInt8Row && (run.row_elements < 1 || run.num_elements % run.row_elements != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("a run of ", run.num_elements, " elements in rows of ",
                                                   run.row_elements, "; int8_row takes whole rows"));
  }
  if (run.mx8.codes != nullptr && run.num_elements % kMxElements != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a run of ", run.num_elements, " elements with a copy in mx8, which has whole blocks of ", kMxElements));
  }
  return absl::OkStatus();
}

// What a run tells, where it is asked for.
absl::Status AddTold(const OptimizerContext& context, const OptimizerRun& run, Streams& streams) {
  const int64_t n = run.num_elements, tiles = PartLayout{1, kStepAlignment}.BytesOf(n);
  const auto add = [&](const char* name, const void* data, int64_t bytes, int64_t alignment) {
    return data == nullptr ? absl::OkStatus() : streams.Add(name, data, bytes, alignment, true);
  };
  RETURN_IF_ERROR(add("the square sums", run.square_sums, 4 * tiles, 4));
  RETURN_IF_ERROR(add("the changes", run.changed, tiles, 1));
  RETURN_IF_ERROR(add("the largest", run.largest, PartLayout{4, kLargestElements}.BytesOf(n), 4));
  RETURN_IF_ERROR(add("the digests", run.digests, 8 * (1 + NumStates(context.hyper)), 8));
  if (run.mx8.codes == nullptr) return absl::OkStatus();
  return streams.AddStored("the copy in mx8", run.mx8, {{1}, {1, kMxElements}}, n, true);
}

}  // namespace

absl::Status CheckRun(const OptimizerContext& context, const OptimizerRun& run) {
  RETURN_IF_ERROR(CheckNumbers(context, run));
  const int64_t n = run.num_elements;
  const StoredLayout weights = LayoutOf(context.weights, std::max<int64_t>(run.row_elements, 1));
  const StoredLayout states = LayoutOf(context.states);
  const int64_t gradient_bytes = context.gradients == Format::kFp32 ? 4 : 2;
  Streams streams;
  for (int slot = 0; slot < run.num_slots; ++slot) {
    RETURN_IF_ERROR(streams.Add("a gradient", run.gradients[slot], n * gradient_bytes, gradient_bytes, false));
  }
  RETURN_IF_ERROR(streams.AddStored("weights", run.weights_in, weights, n, false));
  RETURN_IF_ERROR(streams.AddStored("weights", run.weights_out, weights, n, true));
  constexpr const char* kStates[3] = {"the first state", "the second state", "the third state"};
  for (int s = 0; s < NumStates(context.hyper); ++s) {
    RETURN_IF_ERROR(streams.AddStored(kStates[s], run.states_in[s], states, n, false));
    RETURN_IF_ERROR(streams.AddStored(kStates[s], run.states_out[s], states, n, true));
  }
  for (int c = 0; c < run.num_copies; ++c) {
    RETURN_IF_ERROR(streams.Add("a copy", run.copies[c], weights.codes.BytesOf(n), weights.codes.bytes, true));
  }
  RETURN_IF_ERROR(AddTold(context, run, streams));
  return streams.CheckOverlap();
}

void OptimizerStepSimd(const OptimizerContext& context, const OptimizerRun& run) {
#if defined(__x86_64__)
  const ScopedFpEnvironment environment;
  simd8::OptimizerStep(context, run);
#else
  OptimizerStepReference(context, run);
#endif
}

void GradientSquaresSimd(const OptimizerContext& context, const OptimizerRun& run) {
#if defined(__x86_64__)
  const ScopedFpEnvironment environment;
  simd8::GradientSquares(context, run);
#else
  GradientSquaresReference(context, run);
#endif
}

OptimizerStepFn BestGradientSquares() { return SimdSupported() ? GradientSquaresSimd : GradientSquaresReference; }

OptimizerStepFn BestOptimizerStep() { return SimdSupported() ? OptimizerStepSimd : OptimizerStepReference; }

}  // namespace shardmesh
