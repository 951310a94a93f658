#include "server/reform.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/reform.h"

namespace shardmesh {

absl::StatusOr<Reformed> Reform(const MeshSpec& defined, const MeshSpec& from, std::vector<MemberRecord> holders,
                                std::vector<Candidate> spares) {
  if (from.NumRanks(DimRole::kReplicate) == 1) return absl::FailedPreconditionError("its mesh has no replicas");
  std::sort(holders.begin(), holders.end(), [](const MemberRecord& a, const MemberRecord& b) { return a.was < b.was; });
  Reformed reformed;
  std::vector<MemberRecord>& members = reformed.members;
  for (int64_t shard = 0; shard < from.NumRanks(DimRole::kShard); ++shard) {
    const auto holder = std::find_if(holders.begin(), holders.end(),
                                     [&](const MemberRecord& member) { return ShardOf(from, member.was) == shard; });
    if (holder == holders.end()) {
      return absl::FailedPreconditionError(absl::StrCat("shard ", shard, " has no other copy"));
    }
    members.push_back(std::move(*holder));
    holders.erase(holder);
  }
  std::move(holders.begin(), holders.end(), std::back_inserter(members));
  std::sort(spares.begin(), spares.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.num_jobs, a.worker->name) < std::tie(b.num_jobs, b.worker->name);
  });
  for (const Candidate& spare : spares) members.push_back({*spare.worker, false, -1});
  for (MemberRecord& member : members) member.ready = false;
  reformed.mesh = MeshFor(defined, static_cast<int64_t>(members.size()));
  for (size_t rank = reformed.mesh.NumRanks(); rank < members.size() && members[rank].was >= 0; ++rank) {
    reformed.others.push_back(members[rank]);
  }
  members.resize(reformed.mesh.NumRanks());
  return reformed;
}

}  // namespace shardmesh
