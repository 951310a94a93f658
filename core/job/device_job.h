// Which jobs workers on a CUDA device can do (worker/pass/device/device_pass.h). Pure, thread-safe.
#pragma once

#include "absl/status/status.h"
#include "core/job/job.h"
#include "core/job/plan.h"

namespace shardmesh {

inline constexpr int kMaxDeviceSlots = 64;  // a message of the UNIX socket has the descriptors of all

// Unimplemented: what of the job only processors can do, and what would work. `hosts`: of the job.
absl::Status CheckDeviceJob(const JobSpec& job, const Plan& plan, int hosts);

}  // namespace shardmesh
