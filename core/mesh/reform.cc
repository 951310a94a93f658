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

MeshSpec WithReplicas(const MeshSpec& mesh, int64_t replicas) {
  MeshSpec fewer = mesh;
  if (replicas < mesh.NumRanks(DimRole::kReplicate)) Resize(fewer, DimRole::kReplicate, replicas);
  return fewer;
}

int64_t ReplicaDomains(const MeshSpec& mesh, int64_t hosts) {
  bool shards = false;
  for (const MeshDim& dim : mesh.dims) {
    if (dim.size == 1) continue;
    if (dim.role == DimRole::kReplicate && shards) return 1;  // replicas of a shard are neighbours
    shards = shards || dim.role == DimRole::kShard;
  }
  const int64_t replicas = mesh.NumRanks(DimRole::kReplicate);
  if (replicas % hosts == 0) return hosts;
  return hosts % replicas == 0 ? replicas : 1;
}

int64_t CopyKeeper(int64_t rank, int64_t ranks, int64_t hosts) { return (rank + ranks / hosts) % ranks; }

std::vector<int64_t> HostCounts(const MeshSpec& mesh, int copies) {
  std::vector<int64_t> counts;
  const auto apart = [&](int64_t hosts) {
    return std::max(ReplicaDomains(mesh, hosts), std::min<int64_t>(hosts, copies));
  };
  for (int64_t count = 1; count <= mesh.NumRanks(); ++count) {
    if (mesh.NumRanks() % count == 0) counts.push_back(count);
  }
  std::stable_sort(counts.begin(), counts.end(), [&](int64_t a, int64_t b) { return apart(a) > apart(b); });
  return counts;
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
