#include "server/seats/reform.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/mesh/reform.h"

namespace shardmesh {

namespace {

bool IsOlder(const MemberRecord& a, const MemberRecord& b) { return a.was < b.was; }

void SortSpares(std::vector<Candidate>& spares) {
  std::sort(spares.begin(), spares.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.num_jobs, a.worker->name) < std::tie(b.num_jobs, b.worker->name);
  });
}

// What one host has: holders by old rank, then spares, the best first.
struct OneHost {
  std::vector<MemberRecord> workers;
  int64_t num_holders = 0;
};
using Hosts = std::map<std::string, OneHost>;

Hosts ByHost(const Pool& pool) {
  Hosts hosts;
  for (const MemberRecord& holder : pool.holders) {
    OneHost& host = hosts[holder.worker.host_id];
    host.workers.push_back(holder);
    ++host.num_holders;
  }
  for (const Candidate& spare : pool.spares) {
    if (!spare.traits.spans_hosts) continue;
    hosts[spare.worker->host_id].workers.push_back({*spare.worker, false, -1});
  }
  return hosts;
}

// So many hosts that have so many workers, those with the most holders first; null: there are not so many hosts.
std::optional<std::vector<const OneHost*>> Choose(const Hosts& hosts, int64_t num_hosts, int64_t per_host) {
  std::vector<const OneHost*> chosen;
  for (const auto& [name, host] : hosts) {
    if (static_cast<int64_t>(host.workers.size()) >= per_host) chosen.push_back(&host);
  }
  if (static_cast<int64_t>(chosen.size()) < num_hosts) return std::nullopt;
  const auto held = [&](const OneHost* host) { return std::min(host->num_holders, per_host); };
  std::stable_sort(chosen.begin(), chosen.end(), [&](const OneHost* a, const OneHost* b) { return held(a) > held(b); });
  chosen.resize(num_hosts);
  // The host of the lowest old rank comes first, those without a holder last.
  std::stable_sort(chosen.begin(), chosen.end(), [](const OneHost* a, const OneHost* b) {
    if (a->num_holders == 0 || b->num_holders == 0) return a->num_holders > b->num_holders;
    return IsOlder(a->workers.front(), b->workers.front());
  });
  return chosen;
}

void CollectOthers(const std::vector<MemberRecord>& holders, Reformed& reformed) {
  for (const MemberRecord& holder : holders) {
    const bool stays = std::any_of(reformed.members.begin(), reformed.members.end(),
                                   [&](const MemberRecord& member) { return member.was == holder.was; });
    if (!stays) reformed.others.push_back(holder);
  }
  for (std::vector<MemberRecord>* all : {&reformed.members, &reformed.others}) {
    for (MemberRecord& member : *all) member.ready = false;
  }
}

// `all`, in the order of their ranks, on a mesh that they are enough for.
Reformed OnOneHost(const MeshSpec& mesh, std::vector<MemberRecord> all, const std::vector<MemberRecord>& holders) {
  Reformed reformed{mesh, std::move(all), {}};
  reformed.members.resize(mesh.NumRanks());
  CollectOthers(holders, reformed);
  return reformed;
}

Reformed OnHosts(const MeshSpec& mesh, const std::vector<const OneHost*>& hosts,
                 const std::vector<MemberRecord>& holders) {
  Reformed reformed{mesh, {}, {}};
  const int64_t per_host = mesh.NumRanks() / static_cast<int64_t>(hosts.size());
  for (const OneHost* const host : hosts) {
    reformed.members.insert(reformed.members.end(), host->workers.begin(), host->workers.begin() + per_host);
  }
  CollectOthers(holders, reformed);
  return reformed;
}

// FailedPrecondition: there is no holder of a shard.
absl::Status CheckShards(const MeshSpec& from, const std::vector<MemberRecord>& holders) {
  for (int64_t shard = 0; shard < from.NumRanks(DimRole::kShard); ++shard) {
    const bool held = std::any_of(holders.begin(), holders.end(),
                                  [&](const MemberRecord& member) { return ShardOf(from, member.was) == shard; });
    if (held) continue;
    return absl::FailedPreconditionError(from.NumRanks(DimRole::kReplicate) == 1
                                             ? "its mesh has no replicas"
                                             : absl::StrCat("shard ", shard, " has no other copy"));
  }
  return absl::OkStatus();
}

// On the holders' host, which has all of them.
Reformed ReformOnOneHost(const MeshSpec& defined, const MeshSpec& from, const Pool& pool) {
  std::vector<MemberRecord> holders = pool.holders, members;
  for (int64_t shard = 0; shard < from.NumRanks(DimRole::kShard); ++shard) {
    const auto holder = std::find_if(holders.begin(), holders.end(),
                                     [&](const MemberRecord& member) { return ShardOf(from, member.was) == shard; });
    members.push_back(std::move(*holder));
    holders.erase(holder);
  }
  std::move(holders.begin(), holders.end(), std::back_inserter(members));
  for (const Candidate& spare : pool.spares) members.push_back({*spare.worker, false, -1});
  const MeshSpec mesh = MeshFor(defined, static_cast<int64_t>(members.size()));
  return OnOneHost(mesh, std::move(members), pool.holders);
}

struct Arrangement {
  MeshSpec mesh;
  std::vector<const OneHost*> hosts;
  auto rank() const {
    const auto num_hosts = static_cast<int64_t>(hosts.size());
    return std::make_tuple(mesh.NumRanks(), ReplicaDomains(mesh, num_hosts), -num_hosts);
  }
};

Reformed ReformOnHosts(const MeshSpec& defined, const Pool& pool) {
  const Hosts hosts = ByHost(pool);
  size_t most = 0;
  for (const auto& [name, host] : hosts) most = std::max(most, host.workers.size());
  std::optional<Arrangement> best;
  const auto consider = [&](const MeshSpec& mesh, int64_t num_hosts) {
    if (mesh.NumRanks() % num_hosts != 0) return;
    auto chosen = Choose(hosts, num_hosts, mesh.NumRanks() / num_hosts);
    if (!chosen.has_value() || chosen->front()->num_holders == 0) return;
    Arrangement arrangement{mesh, *std::move(chosen)};
    if (!best.has_value() || arrangement.rank() > best->rank()) best = std::move(arrangement);
  };
  const int64_t replicas = defined.NumRanks(DimRole::kReplicate), shards = defined.NumRanks(DimRole::kShard);
  for (int64_t num_hosts = 1; num_hosts <= static_cast<int64_t>(hosts.size()); ++num_hosts) {
    for (int64_t per_host = 1; per_host <= static_cast<int64_t>(most); ++per_host) {
      const int64_t workers = num_hosts * per_host;
      if (workers >= shards) consider(WithReplicas(defined, std::min(replicas, workers / shards)), num_hosts);
      consider(MeshFor(defined, workers), num_hosts);
    }
  }
  return OnHosts(best->mesh, best->hosts, pool.holders);  // one worker on one host is always possible
}

void Sort(Pool& pool) {
  std::sort(pool.holders.begin(), pool.holders.end(), IsOlder);
  SortSpares(pool.spares);
}

}  // namespace

absl::StatusOr<Reformed> Reform(const MeshSpec& defined, const MeshSpec& from, Pool pool) {
  if (absl::Status held = CheckShards(from, pool.holders); !held.ok()) return held;
  Sort(pool);
  return pool.on_several ? ReformOnHosts(defined, pool) : ReformOnOneHost(defined, from, pool);
}

absl::StatusOr<Reformed> FormOn(const MeshSpec& mesh, Pool pool) {
  Sort(pool);
  const int64_t num_ranks = mesh.NumRanks();
  if (!pool.on_several && !pool.holders.empty()) {
    std::vector<MemberRecord> all = pool.holders;
    for (const Candidate& spare : pool.spares) {
      if (spare.worker->host_id == pool.holders[0].worker.host_id) all.push_back({*spare.worker, false, -1});
    }
    if (static_cast<int64_t>(all.size()) >= num_ranks) return OnOneHost(mesh, std::move(all), pool.holders);
  }
  const Hosts hosts = pool.spans_hosts ? ByHost(pool) : Hosts();
  for (const int64_t num_hosts : HostCounts(mesh, pool.copies)) {
    const auto chosen = Choose(hosts, num_hosts, num_ranks / num_hosts);
    if (chosen.has_value() && chosen->front()->num_holders > 0) return OnHosts(mesh, *chosen, pool.holders);
  }
  return absl::FailedPreconditionError(absl::StrCat("mesh ", mesh.ToString(), " needs ", num_ranks, " workers of ",
                                                    pool.spans_hosts ? "one host, or evenly of several" : "its host",
                                                    "; there are its ", pool.holders.size(), " and ",
                                                    pool.spares.size(), " others"));
}

}  // namespace shardmesh
