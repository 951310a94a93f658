#include "server/seats/reform.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/mesh/reform.h"

namespace shardmesh {

namespace {

void SortByOldRank(std::vector<MemberRecord>& holders) {
  std::sort(holders.begin(), holders.end(), [](const MemberRecord& a, const MemberRecord& b) { return a.was < b.was; });
}

void AddSpares(std::vector<Candidate> spares, std::vector<MemberRecord>& members) {
  std::sort(spares.begin(), spares.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.num_jobs, a.worker->name) < std::tie(b.num_jobs, b.worker->name);
  });
  for (const Candidate& spare : spares) members.push_back({*spare.worker, false, -1});
}

// `all`, in the order of their ranks, on a mesh that they are enough for.
Reformed On(const MeshSpec& mesh, std::vector<MemberRecord> all) {
  Reformed reformed{mesh, std::move(all), {}};
  std::vector<MemberRecord>& members = reformed.members;
  for (MemberRecord& member : members) member.ready = false;
  for (size_t rank = mesh.NumRanks(); rank < members.size() && members[rank].was >= 0; ++rank) {
    reformed.others.push_back(members[rank]);
  }
  members.resize(mesh.NumRanks());
  return reformed;
}

}  // namespace

absl::StatusOr<Reformed> Reform(const MeshSpec& defined, const MeshSpec& from, std::vector<MemberRecord> holders,
                                std::vector<Candidate> spares) {
  SortByOldRank(holders);
  std::vector<MemberRecord> members;
  for (int64_t shard = 0; shard < from.NumRanks(DimRole::kShard); ++shard) {
    const auto holder = std::find_if(holders.begin(), holders.end(),
                                     [&](const MemberRecord& member) { return ShardOf(from, member.was) == shard; });
    if (holder == holders.end()) {
      return absl::FailedPreconditionError(from.NumRanks(DimRole::kReplicate) == 1
                                               ? "its mesh has no replicas"
                                               : absl::StrCat("shard ", shard, " has no other copy"));
    }
    members.push_back(std::move(*holder));
    holders.erase(holder);
  }
  std::move(holders.begin(), holders.end(), std::back_inserter(members));
  AddSpares(std::move(spares), members);
  const MeshSpec mesh = MeshFor(defined, static_cast<int64_t>(members.size()));
  return On(mesh, std::move(members));
}

absl::StatusOr<Reformed> FormOn(const MeshSpec& mesh, std::vector<MemberRecord> holders,
                                std::vector<Candidate> spares) {
  SortByOldRank(holders);
  const size_t num_holders = holders.size();
  AddSpares(std::move(spares), holders);
  if (static_cast<int64_t>(holders.size()) < mesh.NumRanks()) {
    return absl::FailedPreconditionError(absl::StrCat("mesh ", mesh.ToString(), " needs ", mesh.NumRanks(),
                                                      " workers of its host; there are its ", num_holders, " and ",
                                                      holders.size() - num_holders, " others"));
  }
  return On(mesh, std::move(holders));
}

}  // namespace shardmesh
