#include "core/layout/stored_plan.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "core/base/digest.h"
#include "core/base/status.h"

namespace shardmesh {

StoredPlan::StoredPlan(BucketLayout layout, Mesh mesh, std::vector<std::string> replicate, Mesh by_replica)
    : layout_(std::move(layout)),
      mesh_(std::move(mesh)),
      replicate_(std::move(replicate)),
      by_replica_(std::move(by_replica)),
      instances_(by_replica_.Instances()) {
  Hasher hasher;
  hasher.Add("shardmesh stored plan 1");
  hasher.Add(layout_.hash());
  hasher.Add(static_cast<int64_t>(instances_.size()));
  for (const std::vector<Rank>& instance : instances_) {
    for (const Rank rank : instance) hasher.Add(rank.value());
  }
  hash_ = hasher.Hex();
}

absl::StatusOr<StoredPlan> StoredPlan::Create(std::vector<LayoutTensor> tensors, LayoutOptions options,
                                              const Mesh& mesh, const std::vector<std::string>& replicate) {
  for (const std::string& name : replicate) {
    RETURN_IF_ERROR(mesh.SizeOf(name).status());
    if (absl::c_count(replicate, name) == 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("replicate names ", name, " twice; name a dimension once"));
  }
  std::vector<std::string> replicas, shards;
  options.num_shards = 1;
  for (const MeshAxis& axis : mesh.Axes()) {
    const bool replicates = absl::c_linear_search(replicate, axis.name);
    (replicates ? replicas : shards).push_back(axis.name);
    if (!replicates) options.num_shards *= axis.size;
  }
  replicas.insert(replicas.end(), shards.begin(), shards.end());
  ASSIGN_OR_RETURN(Mesh by_replica, mesh.Transpose(replicas));
  ASSIGN_OR_RETURN(BucketLayout layout, BucketLayout::Create(std::move(tensors), options));
  return StoredPlan(std::move(layout), mesh, replicate, std::move(by_replica));
}

std::vector<Rank> StoredPlan::RanksOf(int64_t shard) const {
  std::vector<Rank> ranks;
  for (const std::vector<Rank>& instance : instances_) {
    for (size_t at = shard; at < instance.size(); at += layout_.num_shards()) ranks.push_back(instance[at]);
  }
  return ranks;
}

absl::StatusOr<int64_t> StoredPlan::ShardOf(Rank rank) const {
  ASSIGN_OR_RETURN(const std::vector<int64_t> coordinates, by_replica_.CoordinatesOf(rank));
  const std::vector<int64_t> sizes = by_replica_.Sizes();
  int64_t place = 0;
  for (size_t d = 0; d < sizes.size(); ++d) place = place * sizes[d] + coordinates[d];
  return place % layout_.num_shards();
}

absl::StatusOr<std::vector<StoredPart>> StoredPlan::PartsOf(absl::string_view name) const {
  ASSIGN_OR_RETURN(int tensor, layout_.IndexOf(name));
  if (const std::string& owner = layout_.tensors()[tensor].tied_to; !owner.empty()) {
    ASSIGN_OR_RETURN(tensor, layout_.IndexOf(owner));
  }
  std::vector<StoredPart> parts;
  const auto [first, last] = layout_.ShardsOf(tensor);
  for (int64_t shard = first; shard <= last; ++shard) {
    for (const Stretch& stretch : layout_.StretchesOf(layout_.places()[tensor].bucket, shard)) {
      if (stretch.tensor == tensor) parts.push_back({shard, stretch});
    }
  }
  return parts;
}

absl::StatusOr<std::vector<RankCopy>> CopiesOf(const StoredPlan& from, const StoredPlan& to, Rank rank) {
  ASSIGN_OR_RETURN(const int64_t shard, to.ShardOf(rank));
  ASSIGN_OR_RETURN(const std::vector<ShardCopy> copies, CopiesInto(from.layout(), to.layout(), shard));
  std::vector<RankCopy> by_rank;
  by_rank.reserve(copies.size());
  for (const ShardCopy& copy : copies) {
    const std::vector<Rank> ranks = from.RanksOf(copy.source_shard);
    by_rank.push_back({absl::c_linear_search(ranks, rank) ? rank : ranks[rank.value() % ranks.size()], copy});
  }
  return by_rank;
}

}  // namespace shardmesh
