#include "core/mesh/reform.h"

#include <algorithm>

namespace shardmesh {
namespace {

void Resize(MeshSpec& mesh, DimRole role, int64_t size) {
  for (MeshDim& dim : mesh.dims) {
    if (dim.role != role) continue;
    dim.size = size;
    size = 1;
  }
}

}  // namespace

MeshSpec MeshFor(const MeshSpec& mesh, int64_t num_workers) {
  if (num_workers >= mesh.NumRanks()) return mesh;
  const int64_t replicas = mesh.NumRanks(DimRole::kReplicate), shards = mesh.NumRanks(DimRole::kShard);
  const int64_t fewest_shards = (shards + 1) / 2;
  const int64_t kept_replicas = std::clamp<int64_t>(num_workers / fewest_shards, 1, replicas);
  MeshSpec smaller = mesh;
  Resize(smaller, DimRole::kReplicate, kept_replicas);
  Resize(smaller, DimRole::kShard, std::min(shards, num_workers / kept_replicas));
  return smaller;
}

int64_t ShardOf(const MeshSpec& mesh, int64_t rank) {
  int64_t shard = 0, stride = 1;
  for (auto dim = mesh.dims.rbegin(); dim != mesh.dims.rend(); ++dim) {
    if (dim->role == DimRole::kShard) {
      shard += rank % dim->size * stride;
      stride *= dim->size;
    }
    rank /= dim->size;
  }
  return shard;
}

}  // namespace shardmesh
