// Groups of every implementation on CPUs, all ranks in this process: rank r with epochs[r]. Tests only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/transport/testing/group_family.h"

namespace shardmesh {

Groups MakeLocalGroups(const std::vector<uint64_t>& epochs, RankNames names = {});
// Over one mapping of private staging that all ranks share; the ranks sleep while they wait.
Groups MakeSymmetricGroups(const std::vector<uint64_t>& epochs, RankNames names = {});
// Over loopback. `key`: of their rendezvous.
Groups MakeGlooGroups(const std::vector<uint64_t>& epochs, RankNames names = {}, const std::string& key = "group");

}  // namespace shardmesh
