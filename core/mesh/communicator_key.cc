#include "core/mesh/communicator_key.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "core/base/digest.h"
#include "core/base/status.h"

namespace shardmesh {

std::string CommunicatorKey(std::vector<Rank> ranks) {
  absl::c_sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  Hasher hasher;
  for (const Rank rank : ranks) hasher.Add(static_cast<int64_t>(rank.value()));
  return hasher.Hex();
}

absl::StatusOr<std::vector<Communicator>> Communicators(const std::vector<MeshGroups>& asked) {
  std::vector<Communicator> communicators;
  absl::flat_hash_map<std::string, size_t> by_key;  // index into communicators
  for (size_t a = 0; a < asked.size(); ++a) {
    ASSIGN_OR_RETURN(std::vector<std::vector<Rank>> groups, asked[a].mesh.Groups(asked[a].names));
    for (size_t g = 0; g < groups.size(); ++g) {
      absl::c_sort(groups[g]);
      std::string key = CommunicatorKey(groups[g]);
      const auto [at, added] = by_key.emplace(key, communicators.size());
      if (added) communicators.push_back({std::move(key), std::move(groups[g]), {}});
      communicators[at->second].uses.push_back({a, g});
    }
  }
  return communicators;
}

}  // namespace shardmesh
