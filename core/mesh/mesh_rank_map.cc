#include "core/mesh/mesh_rank_map.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {

Mesh::RankMap::RankMap(std::vector<Rank> by_position) : ranks(std::move(by_position)) {
  std::vector<std::pair<Rank, int32_t>> pairs;
  pairs.reserve(ranks.size());
  for (const Rank rank : ranks) pairs.emplace_back(rank, static_cast<int32_t>(pairs.size()));
  if (!absl::c_is_sorted(pairs)) absl::c_sort(pairs);
  positions.reserve(ranks.size());
  sorted.reserve(ranks.size());
  for (const auto& [rank, position] : pairs) {
    positions.push_back(position);
    sorted.push_back(rank);
  }
}

Mesh::RankMap::RankMap(const RankMap& other, const std::vector<int32_t>& order)
    : ranks(order.size()), positions(order.size()), sorted(other.sorted) {
  std::vector<int32_t> moved_to(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    ranks[i] = other.ranks[order[i]];
    moved_to[order[i]] = static_cast<int32_t>(i);
  }
  for (size_t k = 0; k < order.size(); ++k) positions[k] = moved_to[other.positions[k]];
}

absl::Status Mesh::RankMap::Check() const {
  if (sorted.front() < Rank(0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: rank ", sorted.front().value(), " is negative; ranks count from 0"));
  }
  const auto twice = absl::c_adjacent_find(sorted);
  if (twice != sorted.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: rank ", twice->value(), " is given twice; every rank has one position"));
  }
  return absl::OkStatus();
}

std::optional<int32_t> Mesh::RankMap::OrdinalOf(Rank rank) const {
  const int64_t guess = int64_t{rank.value()} - sorted.front().value();  // right when no numbers are left out
  if (guess >= 0 && guess < static_cast<int64_t>(sorted.size()) && sorted[guess] == rank) return guess;
  const auto at = absl::c_lower_bound(sorted, rank);
  if (at == sorted.end() || *at != rank) return std::nullopt;
  return static_cast<int32_t>(at - sorted.begin());
}

}  // namespace shardmesh
