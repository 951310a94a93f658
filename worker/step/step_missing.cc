// Of StepProtocol: the slots that a step waits for, and who has them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

bool StepProtocol::IsComplete(int slot, Step step) const {
  const ElsewhereWords& elsewhere = control_->elsewhere[slot];
  bool complete = std::max(control_->slots[slot].declared.load(), elsewhere.declared.load()) >= step.value();
  const uint64_t far = elsewhere.declared.load() >= step.value() ? elsewhere.gradient_shards.load() : 0;
  for (int p = 0; p < plan_->num_shards() && !plan_->bucketed(); ++p) {
    complete = complete && (control_->gradient_shards[slot][p].load() >= step.value() || (far >> p & 1) != 0);
  }
  return complete;
}

std::vector<MissingSlot> StepProtocol::MissingSlots(Step step) const {
  std::vector<MissingSlot> missing;
  if (plan_->pulled()) {
    for (const auto& [slot, seat] : Pulled().Taken()) {
      missing.push_back({slot, control_->slots[seat].holder.load(), control_->slots[seat].holder_pid.load()});
    }
    return missing;
  }
  for (int s = 0; s < job_->num_slots; ++s) {
    if (IsComplete(s, step)) continue;
    const uint64_t holder = control_->slots[s].holder.load();
    missing.push_back({s, holder, control_->slots[s].holder_pid.load(), control_->elsewhere[s].holder.load(),
                       control_->slots[s].times_left.load()});
  }
  return missing;
}

std::string StepProtocol::WaitsFor(Step step) const {
  if (plan_->pulled()) return Pulled().WaitsFor();
  std::vector<std::string> missing;
  for (const MissingSlot& each : MissingSlots(step)) {
    missing.push_back(each.holder != 0 ? absl::StrCat(each.slot, " (trainer pid ", each.pid, ")")
                      : each.far_holder != 0
                          ? absl::StrCat(each.slot, " (a trainer attached to rank ", AttachedTo(each.far_holder), ")")
                          : absl::StrCat(each.slot));
  }
  return missing.empty() ? "no slot is missing, the workers are at it"
                         : absl::StrCat("missing slots: ", absl::StrJoin(missing, ","));
}

}  // namespace shardmesh
