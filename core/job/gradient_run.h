// What is looked for in the gradients of a slot, once, before they count: whether they are finite, on which the
// workers' pass relies, and a digest, by which two trainers that did the same slot are compared. An attached trainer
// looks while the gradients are in its cache; for a connected one its worker does. Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/format/finite.h"
#include "core/format/stream_digest.h"
#include "core/job/job.h"
#include "core/job/plan.h"

namespace shardmesh {

// Elements of one tensor's gradient, in memory.
struct GradientRun {
  const char* data = nullptr;
  Format format = Format::kFp32;
  int64_t num_elements = 0;
  int64_t num_bytes() const { return num_elements * BytesPerElement(format); }
};

// Of a tensor that has gradients, in a window.
inline GradientRun GradientIn(const Plan& plan, int tensor, const char* window) {
  const Placement& at = plan.placements()[tensor];
  const Format format = plan.gradient_format();
  return {window + plan.buckets()[at.bucket].gradient_offset + at.offset * BytesPerElement(format), format,
          at.num_elements};
}

// False: `element` is the first that is not finite, or too large for a sum of all slots.
inline bool IsFinite(const GradientRun& run, const JobSpec& job, int64_t* element) {
  return AllFiniteBelow(run.data, run.format, run.num_elements, job.num_slots, element);
}

// All bits but signs.
bool IsZero(const GradientRun& run);

// Digests of different tensors add up.
inline uint64_t DigestOf(const GradientRun& run, int tensor) {
  return DigestWords(DigestKey(static_cast<uint32_t>(tensor), 0, 0), 0, 8, run.data, run.num_bytes());
}

// The tensors that have gradients: neither tied to another one nor frozen.
std::vector<int> TensorsWithGradients(const JobSpec& job);

// `then`: what to do behind writing finite values: "finish the slot".
absl::Status NotFinite(const JobSpec& job, Slot slot, Step step, int tensor, int64_t element, absl::string_view then);

// What a slot's gradients are, all of them.
struct SlotFindings {
  uint64_t digest = 0;
  std::optional<std::pair<int, int64_t>> non_finite;  // under policy skip: the first tensor with one, and the element
};
// Of a slot with so many tokens, which counts in jobs with token weights alone.
//   InvalidArgument: a gradient that is not finite under policy fail, or not zero where there is no token.
absl::StatusOr<SlotFindings> LookAtSlot(const JobSpec& job, const Plan& plan, const char* window, Slot slot, Step step,
                                        int64_t tokens);

}  // namespace shardmesh
