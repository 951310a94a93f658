#include "worker/lead/hosts/gradient_sources.h"

namespace shardmesh {
namespace {

// A bucket is summed, or all of a step's gradients count: -1.
int BucketOf(const Command& command) { return command.kind == CommandKind::kReduceBucket ? command.bucket : -1; }

}  // namespace

void NoteSources(ControlBlock& control, AllHostWords words, const JobSpec& job, const Plan& plan,
                 const Command& command) {
  if (BucketOf(command) < 0 && control.gradient_sources_step.load() == command.step) return;
  for (int s = 0; s < job.num_slots; ++s) {
    for (int p = 0; p < plan.num_shards(); ++p) {
      const int host = HostOfShard(words, s, p, BucketOf(command));
      control.gradient_sources[s][p].store(host < 0 ? kNoSource : static_cast<uint8_t>(host));
    }
  }
}

void SettleSources(ControlBlock& control, int64_t step) { control.gradient_sources_step.store(step); }

std::vector<HostWords> WordsOfSources(const ControlBlock& control, const JobSpec& job, const Plan& plan,
                                      const Command& command, int num_hosts) {
  std::vector<HostWords> words(num_hosts);
  const int bucket = BucketOf(command);
  for (HostWords& host : words) host.committed = command.step - 1;
  for (int s = 0; s < job.num_slots; ++s) {
    for (int p = 0; p < plan.num_shards(); ++p) {
      const int source = control.gradient_sources[s][p].load();
      if (source >= num_hosts) continue;
      HostWords& host = words[source];
      if (bucket < 0) {
        host.slots[s].gradient_shards |= uint64_t{1} << p;
      } else if (host.buckets.empty() || host.buckets.back().slot != s) {
        host.buckets.push_back({bucket, s, uint64_t{1} << p});
      } else {
        host.buckets.back().bits |= uint64_t{1} << p;
      }
    }
  }
  return words;
}

}  // namespace shardmesh
