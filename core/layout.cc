#include "core/layout.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
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

std::string SpaceOf(const ParameterSpec& p) {
  return absl::StrCat(WeightFormatName(p.format), "/", StateFormatName(p.states), "/", GatherFormatName(p.gather),
                      p.frozen ? "/frozen" : "");
}

std::string HashOf(const JobSpec& job, absl::Span<const Bucket> buckets, absl::Span<const Placement> placements) {
  Hasher hasher;
  hasher.Add("shardmesh plan 3");
  hasher.Add(job.mesh.ToString());
  hasher.Add(job.num_slots);
  hasher.Add(FormatName(job.gradient_format));
  hasher.Add(NumStates(job.optimizer));
  hasher.Add(job.clip_norm > 0 ? 1 : 0);
  for (const Bucket& b : buckets) {
    hasher.Add(WeightFormatName(b.weights));
    hasher.Add(StateFormatName(b.states));
    hasher.Add(b.frozen ? 1 : 0);
    hasher.Add(GatherFormatName(b.gather));
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
  std::vector<int64_t> shard_strides, replica_strides;
  LayoutOptions options;
  options.num_shards = RoleStrides(job.mesh, DimRole::kShard, shard_strides);
  options.bucket_elements = job.bucket_elements;
  // A job's buckets have the size that it asks for, unless a bucket were padding for the larger part.
  options.max_padding = options.max_coarse_padding = 1;
  std::vector<LayoutTensor> tensors;
  for (const ParameterSpec& p : job.parameters) {
    tensors.push_back({p.name, {p.NumElements()}, SpaceOf(p), Granule{GranuleKind::kFlat, kBlockElements}, p.tied_to});
  }
  ASSIGN_OR_RETURN(BucketLayout layout, BucketLayout::Create(std::move(tensors), options));

  Plan plan(std::move(layout));
  plan.gradient_format_ = job.gradient_format;
  plan.num_states_ = NumStates(job.optimizer);
  plan.clips_ = job.clip_norm > 0;
  plan.num_shards_ = static_cast<int>(options.num_shards);
  plan.num_replicas_ = static_cast<int>(RoleStrides(job.mesh, DimRole::kReplicate, replica_strides));
  plan.shard_strides_ = std::move(shard_strides);
  plan.replica_strides_ = std::move(replica_strides);
  for (const MeshDim& dim : job.mesh.dims) plan.mesh_sizes_.push_back(dim.size);
  for (const LayoutBucket& bucket : plan.layout_->buckets()) {
    const ParameterSpec& first = job.parameters[bucket.tensors.front()];
    plan.buckets_.push_back({first.format, first.states, bucket.num_elements, bucket.shard_elements, bucket.padding});
    plan.buckets_.back().frozen = first.frozen;
    plan.buckets_.back().gather = first.gather;
  }
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    const TensorPlace& place = plan.layout_->places()[i];
    const int bucket = place.bucket >= 0 ? place.bucket : plan.BucketOfNoElements(job.parameters[i]);
    plan.placements_.push_back({bucket, place.offset, place.num_elements});
  }
  RETURN_IF_ERROR(plan.PlaceScales(job));
  for (Bucket& b : plan.buckets_) {
    b.weight_offset = plan.window_bytes_;
    b.gradient_offset = plan.gradient_window_bytes_;
    b.first_block = plan.gradient_elements_ / kBlockElements;
    plan.total_elements_ += b.num_elements;
    plan.version_bytes_ += b.weight_bytes;
    plan.window_bytes_ += RoundUp(b.weight_bytes, kPageBytes);
    if (b.frozen) continue;
    plan.gradient_elements_ += b.num_elements;
    plan.gradient_window_bytes_ += RoundUp(b.num_elements * BytesPerElement(job.gradient_format), kPageBytes);
  }
  plan.hash_ = HashOf(job, plan.buckets_, plan.placements_);
  return plan;
}

// The first bucket of a parameter's formats and as frozen; a new one, without elements, when there is none.
int Plan::BucketOfNoElements(const ParameterSpec& parameter) {
  const auto found = absl::c_find_if(buckets_, [&](const Bucket& bucket) {
    return bucket.weights == parameter.format && bucket.states == parameter.states &&
           bucket.frozen == parameter.frozen && !bucket.coded();
  });
  const int index = static_cast<int>(found - buckets_.begin());
  if (found != buckets_.end()) return index;
  buckets_.push_back({parameter.format, parameter.states});
  buckets_.back().frozen = parameter.frozen;
  return index;
}

// Behind the codes of each bucket: the scales of its tensors, in the order of the job.
absl::Status Plan::PlaceScales(const JobSpec& job) {
  for (Bucket& b : buckets_) b.weight_bytes = b.CodeOffset(b.num_elements);
  for (size_t i = 0; i < placements_.size(); ++i) {
    if (!job.parameters[i].tied_to.empty()) continue;
    Placement& p = placements_[i];
    Bucket& bucket = buckets_[p.bucket];
    ASSIGN_OR_RETURN(p.scales, ScaleBlocksOf(bucket.gather, job.parameters[i].shape));
    p.scale_offset = bucket.weight_bytes;
    p.first_maximum = num_maxima_;
    bucket.weight_bytes += p.scales.num_blocks * GatheredScaleBytes(bucket.gather);
    if (bucket.gather != GatherFormat::kMx8) num_maxima_ += p.scales.num_blocks;
  }
  for (Bucket& b : buckets_) b.weight_bytes = RoundUp(b.weight_bytes, 16);
  for (size_t i = 0; i < placements_.size(); ++i) {
    if (job.parameters[i].tied_to.empty()) continue;
    ASSIGN_OR_RETURN(const int owner, layout_->IndexOf(job.parameters[i].tied_to));
    placements_[i] = placements_[owner];
  }
  return absl::OkStatus();
}

bool Plan::coded() const {
  return absl::c_any_of(buckets_, [](const Bucket& bucket) { return bucket.coded(); });
}

bool Plan::steps_coded() const {
  return absl::c_any_of(buckets_, [](const Bucket& bucket) { return bucket.coded() && !bucket.frozen; });
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
  std::vector<Run> runs;
  if (begin == end) return runs;  // also of a bucket without elements, which the layout does not have
  for (const Stretch& s : layout_->StretchesIn(bucket, begin, end)) {
    const int64_t left = placements_[s.tensor].num_elements - s.first_element;  // a stretch is of whole granules
    runs.push_back({s.tensor, s.first_element, begin + s.shard_offset, std::min(s.num_elements, left)});
  }
  return runs;
}

int64_t Plan::GradientPieceBytes() const {
  return gradient_elements_ / num_shards_ * BytesPerElement(gradient_format_);
}

int64_t Plan::InitialPieceBytes() const { return total_elements_ / num_shards_ * BytesPerElement(Format::kFp32); }

}  // namespace shardmesh
