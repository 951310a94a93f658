#include "kernels/step/step_values.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/format/finite.h"
#include "core/format/format.h"

namespace shardmesh {
namespace {

constexpr float kLargestFp8Scale = 0x1p120f;  // times E4M3's largest number: infinity

absl::Status CheckScales(absl::string_view stream, const PartLayout& layout, const void* scales, int64_t elements,
                         bool zero_scales, float limit = std::numeric_limits<float>::infinity()) {
  const int64_t count = (elements + layout.elements - 1) / layout.elements;
  for (int64_t i = 0; i < count; ++i) {
    const float scale =
        layout.bytes == 2 ? Bf16ToFloat(static_cast<const uint16_t*>(scales)[i]) : static_cast<const float*>(scales)[i];
    if (scale < limit && (scale > 0 || (zero_scales && scale == 0))) continue;
    return absl::InvalidArgumentError(absl::StrCat(stream, ": scale ", i, " is ", scale, "; scales are ",
                                                   zero_scales ? "at least 0" : "above 0", " and ",
                                                   std::isinf(limit) ? "finite" : absl::StrCat("below ", limit)));
  }
  return absl::OkStatus();
}

bool HasScales(StateFormat format) { return format != StateFormat::kFp32 && format != StateFormat::kBf16Sr; }

}  // namespace

absl::Status CheckStepValues(const OptimizerContext& context, const OptimizerRun& run, bool zero_scales) {
  if (!std::isfinite(run.clip) || run.clip < 0) {
    return absl::InvalidArgumentError(absl::StrCat("clip is ", run.clip, "; it is finite and at least 0"));
  }
  if (!std::isfinite(run.divide_scale) || run.divide_scale <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sum of gradients would be multiplied by ", run.divide_scale, "; give a number above 0"));
  }
  if (context.weights == WeightFormat::kInt8Row) {
    const StoredLayout layout = LayoutOf(context.weights, run.row_elements);
    RETURN_IF_ERROR(CheckScales("weights", layout.extra, run.weights_in.extra, run.num_elements, zero_scales));
  }
  if (!HasScales(context.states)) return absl::OkStatus();
  const bool fp8 = context.states == StateFormat::kFp8 || context.states == StateFormat::kFp8x32;
  const float limit = fp8 ? kLargestFp8Scale : std::numeric_limits<float>::infinity();
  for (int s = 0; s < NumStates(context.hyper); ++s) {
    RETURN_IF_ERROR(CheckScales(StateName(context.hyper, s), LayoutOf(context.states).extra, run.states_in[s].extra,
                                run.num_elements, zero_scales, limit));
  }
  return absl::OkStatus();
}

std::optional<RefusedGradient> FindRefusedGradient(const OptimizerContext& context, const OptimizerRun& run) {
  for (int slot = 0; slot < run.num_slots; ++slot) {
    int64_t first = 0;
    if (AllFiniteBelow(run.gradients[slot], context.gradients, run.num_elements, run.num_slots, &first)) continue;
    const void* gradients = run.gradients[slot];
    const float value = context.gradients == Format::kFp32
                            ? static_cast<const float*>(gradients)[first]
                            : Bf16ToFloat(static_cast<const uint16_t*>(gradients)[first]);
    return RefusedGradient{slot, first, value};
  }
  return std::nullopt;
}

}  // namespace shardmesh
