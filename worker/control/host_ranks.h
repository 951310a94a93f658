// HostRanks: which ranks of a job are on a host. Ranks are numbered host by host, equally many on each. Plain values.
#pragma once

#include "core/base/ids.h"
#include "core/job/plan.h"
#include "core/job/support.h"

namespace shardmesh {

struct HostRanks {
  int host = 0, num_hosts = 1;
  int per_host = 1;

  static HostRanks OneHost(int num_ranks) { return {0, 1, num_ranks}; }

  // Whether the job has no other host, whose lead would have to agree.
  bool alone() const { return num_hosts == 1; }

  int first() const { return host * per_host; }  // the host's lead
  int end() const { return first() + per_host; }
  bool Has(Rank rank) const { return rank.value() >= first() && rank.value() < end(); }
  int HostOf(Rank rank) const { return rank.value() / per_host; }
};

// Where the job of these ranks runs.
inline Topology TopologyOf(const HostRanks& ranks, const Plan& plan, bool device) {
  return {ranks.num_hosts, plan.num_ranks(), device};
}

// The replicas of one rank's shard on its host share what that host needs of the shard once: chunk c is for the one
// with index c mod count.
struct ReplicaShare {
  int index = 0, count = 1;
};
inline ReplicaShare ShareOf(const Plan& plan, const HostRanks& ranks, Rank rank) {
  const ShardPlace mine = plan.PlaceOf(rank);
  ReplicaShare share{0, 0};
  for (int replica = 0; replica < plan.num_replicas(); ++replica) {
    if (!ranks.Has(plan.RankOf({mine.shard, replica}))) continue;
    if (replica < mine.replica) ++share.index;
    ++share.count;
  }
  return share;
}

// Whether a host has a replica of the shard.
inline bool HostHas(const Plan& plan, HostRanks ranks, int host, int shard) {
  ranks.host = host;
  for (int replica = 0; replica < plan.num_replicas(); ++replica) {
    if (ranks.Has(plan.RankOf({shard, replica}))) return true;
  }
  return false;
}

// What the lead of a host keeps of the other hosts' tables of maxima (worker/lead/hosts/command_data.h).
inline int64_t FarMaximaBytes(const Plan& plan, int num_hosts) {
  return (num_hosts - 1) * plan.scales().num_maxima * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace shardmesh
