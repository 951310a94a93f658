#include "python/binding/stored_plan.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "core/status.h"

namespace shardmesh::python {

absl::StatusOr<StoredPlan> StoredPlan::Create(std::vector<LayoutTensor> tensors, LayoutOptions options,
                                              const Mesh& mesh, const std::vector<std::string>& replicate) {
  for (const std::string& name : replicate) RETURN_IF_ERROR(mesh.SizeOf(name));
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
  return StoredPlan(std::move(layout), mesh, std::move(by_replica));
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

std::string KindName(GranuleKind kind) {
  switch (kind) {
    case GranuleKind::kFlat:
      return "flat";
    case GranuleKind::kRows:
      return "rows";
    case GranuleKind::kBlock:
      return "block";
    case GranuleKind::kWhole:
      return "whole";
  }
  return "unknown";
}

}  // namespace shardmesh::python
