// Which host's gradient shards a command is made of, of a job on several hosts: kept on the control block from the time
// that the leads agree on the command, so that leads that meet again bring the same bytes once more, whatever hosts say
// of their slots by then. For the lead's thread.
#pragma once

#include <vector>

#include "worker/lead/hosts/host_words.h"

namespace shardmesh {

inline constexpr uint8_t kNoSource = 0xff;  // no host has it
static_assert(kMaxHostRanks < kNoSource);

// Writes down what all hosts' words say. No effect if the sources of the command's step are settled.
void NoteSources(ControlBlock& control, AllHostWords words, const JobSpec& job, const Plan& plan,
                 const Command& command);

// From now on the step's gradient shards count from where they were noted: all hosts mark them as their own, since
// members may look for them there.
void SettleSources(ControlBlock& control, int64_t step);

// Words of all hosts that say of gradient shards what was noted for the command, and nothing else.
std::vector<HostWords> WordsOfSources(const ControlBlock& control, const JobSpec& job, const Plan& plan,
                                      const Command& command, int num_hosts);

}  // namespace shardmesh
