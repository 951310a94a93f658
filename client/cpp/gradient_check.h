// What a trainer looks for in gradients that it has written, once, while they are in its cache: whether they are
// finite, on which the workers' pass relies, and a digest, by which two trainers that did the same slot are compared.
// Pure functions; thread-safe.
#pragma once

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "core/base/status.h"
#include "core/format/finite.h"
#include "core/format/stream_digest.h"

namespace shardmesh {

struct GradientRun {
  const char* data = nullptr;
  Format format = Format::kFp32;
  int64_t num_elements = 0;
  int64_t num_bytes() const { return num_elements * BytesPerElement(format); }
};

// Of a tensor that has gradients, in a window.
inline GradientRun GradientIn(const Job& job, int tensor, const char* window) {
  const Placement& at = job.plan().placements()[tensor];
  const Format format = job.plan().gradient_format();
  return {window + job.plan().buckets()[at.bucket].gradient_offset + at.offset * BytesPerElement(format), format,
          at.num_elements};
}

// A view of a tensor's gradients in a window, by this client's name. NotFound, InvalidArgument: as Session::gradient.
inline absl::StatusOr<TensorView> GradientView(const Job& job, absl::string_view name, const char* window) {
  ASSIGN_OR_RETURN(const int tensor, job.Resolve(name));
  if (job.spec().parameters[tensor].frozen) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", job.spec().parameters[tensor].name, "\" is frozen: it has no gradient"));
  }
  const GradientRun run = GradientIn(job, tensor, window);
  return TensorView{const_cast<char*>(run.data), run.format, run.num_elements};
}

// False: `element` is the first that is not finite, or too large for a sum of all slots.
inline bool IsFinite(const GradientRun& run, const JobSpec& job, int64_t* element) {
  return AllFiniteBelow(run.data, run.format, run.num_elements, job.num_slots, element);
}

// All bits but signs.
inline bool IsZero(const GradientRun& run) {
  const char* const byte = run.data;
  int bits = 0;
  const int64_t width = BytesPerElement(run.format);
  for (int64_t i = 0; i < run.num_bytes(); ++i) bits |= byte[i] & (i % width == width - 1 ? 0x7f : 0xff);
  return bits == 0;
}

inline absl::Status NotFinite(const Job& job, Slot slot, Step step, int tensor, int64_t element,
                              absl::string_view then) {
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " of step ", step.value(),
                                                 ": the gradient of \"", job.spec().parameters[tensor].name,
                                                 "\" at element ", element, " is not finite, or not below FLT_MAX / ",
                                                 job.spec().num_slots, "; write finite values and ", then, " again"));
}

// Digests of different tensors add up.
inline uint64_t DigestOf(const GradientRun& run, int tensor) {
  return DigestWords(DigestKey(static_cast<uint32_t>(tensor), 0, 0), 0, 8, run.data, run.num_bytes());
}

}  // namespace shardmesh
