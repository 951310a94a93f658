#include "core/job/device_job.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace shardmesh {

absl::Status CheckDeviceJob(const JobSpec& job, const Plan& plan, int hosts) {
  const auto refused = [&](const std::string& what, const std::string& instead) {
    return absl::UnimplementedError(absl::StrCat("job ", job.name, " ", what,
                                                 ", which workers on a CUDA device cannot do yet; ", instead,
                                                 ", or start the workers with --device cpu"));
  };
  if (hosts > 1) return refused("is on several hosts", "take workers of one host");
  if (plan.bucketed()) return refused("has bucket residency", "take full residency");
  if (plan.pulled()) return refused("has pulled slots", "assign them");
  if (job.check_every > 0) return refused("has check_every", "leave it out");
  if (job.num_slots > kMaxDeviceSlots) {
    return refused(absl::StrCat("has ", job.num_slots, " slots"), absl::StrCat("take at most ", kMaxDeviceSlots));
  }
  for (const ParameterSpec& p : job.parameters) {
    if (job.IsMuon(p)) {
      return refused(absl::StrCat("has parameter \"", p.name, "\", which Muon steps"), "take another optimizer for it");
    }
    if (p.tied_to.empty() && IsCoded(p.format, p.gather)) {
      return refused(absl::StrCat("has parameter \"", p.name, "\", which is gathered as ", GatherFormatName(p.gather)),
                     "gather it as stored");
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
