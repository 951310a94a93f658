#include "core/layout.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "core/digest.h"
#include "core/status.h"

namespace shardmesh {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Row-major strides of the dimensions of one role among themselves; 0 for the others. Returns their product.
int64_t RoleStrides(const MeshSpec& mesh, DimRole role, std::vector<int64_t>& strides) {
  strides.assign(mesh.dims.size(), 0);
  int64_t product = 1;
  for (size_t i = mesh.dims.size(); i-- > 0;) {
    if (mesh.dims[i].role != role) continue;
    strides[i] = product;
    product *= mesh.dims[i].size;
  }
  return product;
}

std::string HashOf(const JobSpec& job, absl::Span<const Bucket> buckets, absl::Span<const Placement> placements) {
  Hasher hasher;
  hasher.Add("shardmesh plan 1");
  hasher.Add(job.mesh.ToString());
  hasher.Add(job.num_slots);
  hasher.Add(FormatName(job.gradient_format));
  for (const Bucket& b : buckets) {
    hasher.Add(FormatName(b.format));
    for (int64_t v : {b.num_elements, b.shard_elements, b.weight_offset, b.gradient_offset}) hasher.Add(v);
  }
  for (size_t i = 0; i < placements.size(); ++i) {
    hasher.Add(job.parameters[i].name);
    hasher.Add(static_cast<int64_t>(job.parameters[i].shape.size()));
    for (int64_t size : job.parameters[i].shape) hasher.Add(size);
    for (int64_t v : {int64_t{placements[i].bucket}, placements[i].offset, placements[i].num_elements}) hasher.Add(v);
  }
  return hasher.Hex();
}

}  // namespace

absl::StatusOr<Plan> Plan::Create(const JobSpec& job) {
  RETURN_IF_ERROR(job.Validate());
  Plan plan;
  plan.gradient_format_ = job.gradient_format;
  plan.num_shards_ = static_cast<int>(RoleStrides(job.mesh, DimRole::kShard, plan.shard_strides_));
  plan.num_replicas_ = static_cast<int>(RoleStrides(job.mesh, DimRole::kReplicate, plan.replica_strides_));
  for (const MeshDim& dim : job.mesh.dims) plan.mesh_sizes_.push_back(dim.size);

  // Owners, in order, into the open bucket of their format; a full bucket is closed.
  plan.placements_.resize(job.parameters.size());
  absl::flat_hash_map<absl::string_view, int> index_of;
  absl::flat_hash_map<int, int> open;  // format -> bucket
  for (int i = 0; i < static_cast<int>(job.parameters.size()); ++i) {
    const ParameterSpec& p = job.parameters[i];
    index_of.emplace(p.name, i);
    if (!p.tied_to.empty()) continue;
    auto [it, fresh] = open.emplace(static_cast<int>(p.format), -1);
    if (fresh || plan.buckets_[it->second].num_elements >= job.bucket_elements) {
      it->second = static_cast<int>(plan.buckets_.size());
      plan.buckets_.push_back(Bucket{p.format});
      plan.owners_.emplace_back();
    }
    Bucket& bucket = plan.buckets_[it->second];
    plan.placements_[i] = {it->second, bucket.num_elements, p.NumElements()};
    plan.owners_[it->second].push_back(i);
    bucket.num_elements += RoundUp(p.NumElements(), kGroupElements);
    bucket.padding += RoundUp(p.NumElements(), kGroupElements) - p.NumElements();
  }
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    if (!job.parameters[i].tied_to.empty()) plan.placements_[i] = plan.placements_[index_of[job.parameters[i].tied_to]];
  }
  for (Bucket& b : plan.buckets_) {
    const int64_t padded = RoundUp(b.num_elements, kGroupElements * plan.num_shards_);
    b.padding += padded - b.num_elements;
    b.num_elements = padded;
    b.shard_elements = padded / plan.num_shards_;
    b.weight_offset = plan.window_bytes_;
    b.gradient_offset = plan.gradient_window_bytes_;
    plan.total_elements_ += padded;
    plan.version_bytes_ += padded * BytesPerElement(b.format);
    plan.window_bytes_ += RoundUp(padded * BytesPerElement(b.format), kPageBytes);
    plan.gradient_window_bytes_ += RoundUp(padded * BytesPerElement(job.gradient_format), kPageBytes);
  }
  plan.hash_ = HashOf(job, plan.buckets_, plan.placements_);
  return plan;
}

ShardPlace Plan::PlaceOf(Rank rank) const {
  ShardPlace place;
  int64_t rest = rank.value();
  for (size_t i = mesh_sizes_.size(); i-- > 0;) {
    const int64_t coordinate = rest % mesh_sizes_[i];
    rest /= mesh_sizes_[i];
    place.shard += static_cast<int>(coordinate * shard_strides_[i]);
    place.replica += static_cast<int>(coordinate * replica_strides_[i]);
  }
  return place;
}

Rank Plan::RankOf(ShardPlace place) const {
  int64_t rank = 0;
  for (size_t i = 0; i < mesh_sizes_.size(); ++i) {
    const int64_t coordinate = shard_strides_[i] != 0 ? place.shard / shard_strides_[i] % mesh_sizes_[i]
                                                      : place.replica / replica_strides_[i] % mesh_sizes_[i];
    rank = rank * mesh_sizes_[i] + coordinate;
  }
  return Rank(static_cast<int32_t>(rank));
}

std::vector<Run> Plan::RunsIn(int bucket, int64_t begin, int64_t end) const {
  const std::vector<int>& owners = owners_[bucket];
  std::vector<Run> runs;
  // The first owner whose padded end is past `begin`.
  auto first = std::partition_point(owners.begin(), owners.end(), [&](int tensor) {
    return placements_[tensor].offset + RoundUp(placements_[tensor].num_elements, kGroupElements) <= begin;
  });
  for (; first != owners.end() && placements_[*first].offset < end; ++first) {
    const Placement& p = placements_[*first];
    const int64_t from = std::max(begin, p.offset);
    const int64_t to = std::min(end, p.offset + RoundUp(p.num_elements, kGroupElements));
    if (from < to) runs.push_back({*first, from - p.offset, from, to - from});
  }
  return runs;
}

int64_t Plan::GradientPieceBytes() const { return total_elements_ / num_shards_ * BytesPerElement(gradient_format_); }

int64_t Plan::InitialPieceBytes() const { return total_elements_ / num_shards_ * BytesPerElement(Format::kFp32); }

}  // namespace shardmesh
