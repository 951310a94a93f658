// Whether a job may have a feature where it is: the questions to the table of core/job/support_table.h. The
// coordinator asks before it places, re-forms or reshards a job, each worker asks again before it builds or does
// something, and `shardctl support` prints the table. Pure, thread-safe.
#pragma once

#include <bitset>

#include "absl/status/status.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "core/job/support_table.h"

namespace shardmesh {

// Where a job is, or would be.
struct Topology {
  int hosts = 1;
  int ranks = 1;        // of all hosts
  bool device = false;  // its steps run on CUDA devices

  TopologyKind kind() const {
    if (device) return hosts > 1 ? TopologyKind::kHostsCuda : TopologyKind::kHostCuda;
    return hosts > 1 ? TopologyKind::kHostsCpu : TopologyKind::kHostCpu;
  }
};

inline constexpr int kMaxDeviceSlots = 64;  // one message of the UNIX socket has the descriptors of all

enum class Counted { kRanks, kSlots };

// The most of something that a job may have.
struct SupportLimit {
  Counted counted;
  bool on_cpu, on_devices;
  int most;
  absl::string_view because;
};
inline constexpr SupportLimit kSupportLimits[] = {
    {Counted::kRanks, true, true, kMaxHostRanks, "a word of the control block has a bit for each"},
    {Counted::kSlots, true, true, kMaxSlots, "the control block has a row for each"},
    {Counted::kSlots, false, true, kMaxDeviceSlots, "one message of the UNIX socket has the descriptors of all"},
};

using FeatureSet = std::bitset<kNumFeatures>;

// What a job needs by its specification. Connected trainers, leases, checkpoints, mapped readers, publishing on demand
// (which publish_every = -1 allows and does not need), restarts, re-forming and resharding are asked of it later.
// REQUIRES: `plan` is that of `job`. Its time does not depend on the number of parameters.
FeatureSet FeaturesOf(const JobSpec& job, const Plan& plan);

// OK: the job can be there with all that FeaturesOf says. Unimplemented: the first feature that the table refuses
// there, or limit that is exceeded; the message names job, feature and topology, and what would work.
absl::Status CheckSupported(const JobSpec& job, const Plan& plan, const Topology& topology);

// The same for one feature, which is asked of a job that is there. Unimplemented, too: the feature excludes one that
// the job has.
absl::Status CheckSupported(const JobSpec& job, const Plan& plan, const Topology& topology, Feature feature);

}  // namespace shardmesh
