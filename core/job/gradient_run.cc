#include "core/job/gradient_run.h"

#include "absl/strings/str_cat.h"

namespace shardmesh {

bool IsZero(const GradientRun& run) {
  const char* const byte = run.data;
  int bits = 0;
  const int64_t width = BytesPerElement(run.format);
  for (int64_t i = 0; i < run.num_bytes(); ++i) bits |= byte[i] & (i % width == width - 1 ? 0x7f : 0xff);
  return bits == 0;
}

std::vector<int> TensorsWithGradients(const JobSpec& job) {
  std::vector<int> tensors;
  for (size_t t = 0; t < job.parameters.size(); ++t) {
    if (job.parameters[t].tied_to.empty() && !job.parameters[t].frozen) tensors.push_back(static_cast<int>(t));
  }
  return tensors;
}

absl::Status NotFinite(const JobSpec& job, Slot slot, Step step, int tensor, int64_t element, absl::string_view then) {
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " of step ", step.value(),
                                                 ": the gradient of \"", job.parameters[tensor].name, "\" at element ",
                                                 element, " is not finite, or not below FLT_MAX / ", job.num_slots,
                                                 "; write finite values and ", then, " again"));
}

absl::StatusOr<SlotFindings> LookAtSlot(const JobSpec& job, const Plan& plan, const char* window, Slot slot, Step step,
                                        int64_t tokens) {
  SlotFindings findings;
  for (const int t : TensorsWithGradients(job)) {
    const GradientRun run = GradientIn(plan, t, window);
    findings.digest += DigestOf(run, t);
    int64_t element = 0;
    if (job.token_weights && tokens == 0 && !IsZero(run)) {
      return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " has no tokens, and the gradient of \"",
                                                     job.parameters[t].name,
                                                     "\" is not zero; write zeros, or say how many tokens it has"));
    }
    if (findings.non_finite.has_value() || IsFinite(run, job, &element)) continue;
    if (job.non_finite == NonFinitePolicy::kFail) return NotFinite(job, slot, step, t, element, "finish the slot");
    findings.non_finite.emplace(t, element);
  }
  return findings;
}

}  // namespace shardmesh
