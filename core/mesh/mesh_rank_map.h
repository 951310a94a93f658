// Mesh::RankMap: which rank stands at which position of a mesh, and back. For the mesh's own source files only.
//
// Ranks are also numbered by their order: ordinal k is the k-th smallest. Maps of the same ranks share the ordinals.
// An immutable value.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "core/base/ids.h"
#include "core/mesh/mesh.h"

namespace shardmesh {

struct Mesh::RankMap {
  std::vector<Rank> ranks;         // by position
  std::vector<int32_t> positions;  // by ordinal
  std::vector<Rank> sorted;        // by ordinal

  explicit RankMap(std::vector<Rank> by_position);

  // The ranks of `other` placed anew: position i has what stood at order[i] there. REQUIRES: a permutation.
  RankMap(const RankMap& other, const std::vector<int32_t>& order);

  // InvalidArgument: a negative or a repeated rank.
  absl::Status Check() const;

  std::optional<int32_t> OrdinalOf(Rank rank) const;
};

}  // namespace shardmesh
