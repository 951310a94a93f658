// The search for silent corruption, as passes on processors and on devices have it (pass_check.cc,
// device/device_checks.h). Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/philox.h"
#include "core/job/job.h"
#include "worker/control/damage.h"

namespace shardmesh {

// Whether a chunk is looked at in a step: one of check_every, drawn anew for each step.
inline bool IsDrawn(const JobSpec& job, int64_t step, int range, int64_t chunk) {
  const uint64_t place = static_cast<uint64_t>(range) << 32 | static_cast<uint64_t>(chunk);
  return Mix64(Mix64(static_cast<uint64_t>(step)) ^ place) % static_cast<uint64_t>(job.check_every) == 0;
}

// Into a member's word of the control block: the first that is found is told.
inline void TellDamage(const Damage& damage, std::atomic<uint64_t>& word) {
  uint64_t none = 0;
  word.compare_exchange_strong(none, damage.Word());
}

// DataLoss: a member's word says that there is damage.
inline absl::Status CheckDamage(const JobSpec& job, int64_t step, const std::atomic<uint64_t>& word) {
  const Damage damage = Damage::Of(word.load());
  if (damage.what == Damage::kNone) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(damage.ToString(job), ", found in step ", step));
}

}  // namespace shardmesh
