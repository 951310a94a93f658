#include "core/job/plan.h"

#include <algorithm>
#include <numeric>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/digest.h"
#include "core/base/status.h"

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

// Elements of a row of int8_row weights: what the last dimension counts.
int64_t RowElements(const ParameterSpec& p) {
  return p.format == WeightFormat::kInt8Row && !p.shape.empty() ? std::max<int64_t>(p.shape.back(), 1) : 1;
}

std::string SpaceOf(const JobSpec& job, const ParameterSpec& p) {
  return absl::StrCat(WeightFormatName(p.format), "/", StateFormatName(p.states), "/",
                      GatherFormatName(GatherOf(p.format, p.gather)), "/states ", job.NumStatesOf(p),
                      p.format == WeightFormat::kInt8Row ? absl::StrCat("/rows of ", RowElements(p)) : "",
                      job.IsMuon(p) ? "/muon" : "", p.frozen ? "/frozen" : "");
}

// A tensor as BucketLayout takes it. `owner`: of its storage.
LayoutTensor TensorOf(const JobSpec& job, const ParameterSpec& p, const ParameterSpec& owner) {
  LayoutTensor tensor{p.name, {p.NumElements()}, SpaceOf(job, owner), {GranuleKind::kFlat, kBlockElements}, p.tied_to};
  if (job.IsMuon(owner)) {
    tensor.shape = p.shape;
    tensor.granule = {GranuleKind::kWhole, 0};
  } else if (p.format == WeightFormat::kInt8Row) {
    const int64_t rows = std::lcm(RowElements(p), kBlockElements);
    tensor.granule.size = std::min(rows, std::max(RoundUp(p.NumElements(), kBlockElements), kBlockElements));
  }
  return tensor;
}

std::string HashOf(const JobSpec& job, absl::Span<const Bucket> buckets, absl::Span<const Placement> placements) {
  Hasher hasher;
  hasher.Add("shardmesh plan 4");
  hasher.Add(job.mesh.ToString());
  hasher.Add(job.num_slots);
  hasher.Add(FormatName(job.gradient_format));
  hasher.Add(job.clip_norm > 0 ? 1 : 0);
  if (job.pulled()) hasher.Add(absl::StrCat("pulled by ", job.num_trainers));
  for (const Bucket& b : buckets) {
    hasher.Add(WeightFormatName(b.weights));
    hasher.Add(StateFormatName(b.states));
    hasher.Add(b.frozen ? 1 : 0);
    hasher.Add(GatherFormatName(b.gather));
    for (int64_t v : {b.num_elements, b.shard_elements, b.weight_offset, b.gradient_offset, int64_t{b.num_states},
                      b.granule_elements, b.row_elements, static_cast<int64_t>(b.shard_begins.size())}) {
      hasher.Add(v);
    }
    for (int64_t begin : b.shard_begins) hasher.Add(begin);
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
  absl::flat_hash_map<absl::string_view, const ParameterSpec*> by_name;
  for (const ParameterSpec& p : job.parameters) by_name[p.name] = &p;
  for (const ParameterSpec& p : job.parameters) {
    tensors.push_back(TensorOf(job, p, p.tied_to.empty() ? p : *by_name[p.tied_to]));
  }
  ASSIGN_OR_RETURN(BucketLayout layout, BucketLayout::Create(std::move(tensors), options));

  Plan plan(std::move(layout));
  plan.gradient_format_ = job.gradient_format;
  plan.clips_ = job.clip_norm > 0;
  plan.slots_ = {job.num_slots, job.num_groups(), job.prefetch_buckets, job.pulled() ? job.num_trainers : 0};
  plan.bucketed_ = job.residency == Residency::kBucket;
  plan.num_shards_ = static_cast<int>(options.num_shards);
  plan.num_replicas_ = static_cast<int>(RoleStrides(job.mesh, DimRole::kReplicate, replica_strides));
  plan.shard_strides_ = std::move(shard_strides);
  plan.replica_strides_ = std::move(replica_strides);
  for (const MeshDim& dim : job.mesh.dims) plan.mesh_sizes_.push_back(dim.size);
  plan.AddBuckets(job);
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    const TensorPlace& place = plan.layout_->places()[i];
    const int bucket = place.bucket >= 0 ? place.bucket : plan.BucketOfNoElements(job, job.parameters[i]);
    const int64_t before = place.owner >= 0 ? plan.buckets_[bucket].begin(place.owner) : 0;
    plan.placements_.push_back({bucket, before + place.offset, place.num_elements});
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

int SlotPlan::live_gradients() const {
  int levels = 0;
  while (1 << levels < num_slots) ++levels;
  return std::max(num_trainers * 13 / 4, levels + 2);
}

void Plan::AddBuckets(const JobSpec& job) {
  for (const LayoutBucket& from : layout_->buckets()) {
    const ParameterSpec& first = job.parameters[from.tensors.front()];
    Bucket bucket{first.format, first.states, from.num_elements, from.shard_elements, from.padding};
    bucket.frozen = first.frozen;
    bucket.gather = GatherOf(first.format, first.gather);
    bucket.num_states = job.NumStatesOf(first);
    bucket.row_elements = RowElements(first);
    if (from.owned) {
      bucket.shard_begins.assign(num_shards_ + 1, 0);
      for (const int32_t tensor : from.tensors) {
        const TensorPlace& place = layout_->places()[tensor];
        bucket.shard_begins[place.owner + 1] += place.padded_elements;
      }
      std::partial_sum(bucket.shard_begins.begin(), bucket.shard_begins.end(), bucket.shard_begins.begin());
    } else {
      bucket.granule_elements = from.granule_elements;
    }
    buckets_.push_back(std::move(bucket));
  }
}

// The first bucket of a parameter's formats and as frozen; a new one, without elements, when there is none.
int Plan::BucketOfNoElements(const JobSpec& job, const ParameterSpec& parameter) {
  const auto found = absl::c_find_if(buckets_, [&](const Bucket& bucket) {
    return bucket.weights == parameter.format && bucket.states == parameter.states &&
           bucket.frozen == parameter.frozen && bucket.gather == GatherFormat::kStored && !bucket.owned();
  });
  const int index = static_cast<int>(found - buckets_.begin());
  if (found != buckets_.end()) return index;
  buckets_.push_back({parameter.format, parameter.states});
  buckets_.back().frozen = parameter.frozen;
  buckets_.back().num_states = job.NumStatesOf(parameter);
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
    bucket.weight_bytes += GatheredScalesBytes(bucket.gather, p.scales.num_blocks);
  }
  for (const bool frozen : {false, true}) {
    for (size_t i = 0; i < placements_.size(); ++i) {
      const Bucket& bucket = buckets_[placements_[i].bucket];
      if (!job.parameters[i].tied_to.empty() || bucket.frozen != frozen) continue;
      placements_[i].first_maximum = scales_.num_maxima;
      if (bucket.quantized() && bucket.gather != GatherFormat::kMx8)
        scales_.num_maxima += placements_[i].scales.num_blocks;
    }
    if (!frozen) scales_.num_stepped_maxima = scales_.num_maxima;
  }
  for (Bucket& b : buckets_) {
    b.weight_bytes = RoundUp(b.weight_bytes, 16);
    scales_.quantized = scales_.quantized || b.quantized();
    scales_.steps_quantized = scales_.steps_quantized || (b.quantized() && !b.frozen);
  }
  for (size_t i = 0; i < placements_.size(); ++i) {
    if (job.parameters[i].tied_to.empty()) continue;
    ASSIGN_OR_RETURN(const int owner, layout_->IndexOf(job.parameters[i].tied_to));
    placements_[i] = placements_[owner];
  }
  return absl::OkStatus();
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
  const std::vector<int32_t>& tensors = layout_->buckets()[bucket].tensors;  // by offset
  auto it = std::partition_point(tensors.begin(), tensors.end(), [&](int32_t t) {
    return placements_[t].offset + placements_[t].num_elements <= begin;
  });
  for (; it != tensors.end() && placements_[*it].offset < end; ++it) {
    const Placement& at = placements_[*it];
    const int64_t from = std::max(begin, at.offset), to = std::min(end, at.offset + at.num_elements);
    runs.push_back({*it, from - at.offset, from, to - from});
  }
  return runs;
}

std::pair<int64_t, int64_t> Plan::MatrixOf(int tensor) const {
  const std::vector<int64_t>& shape = layout_->tensors()[tensor].shape;
  return {shape[0], shape[1]};
}

int64_t Plan::WeightPageBytes(int bucket) const {
  return (buckets_[bucket].weight_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

int64_t Plan::GradientPageBytes(int bucket) const {
  const Bucket& b = buckets_[bucket];
  const int64_t bytes = b.frozen ? 0 : b.num_elements * BytesPerElement(gradient_format_);
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

int64_t Plan::GradientShardBytes(int shard) const {
  int64_t elements = 0;
  for (const Bucket& bucket : buckets_) elements += bucket.gradients(shard);
  return elements * BytesPerElement(gradient_format_);
}

int64_t Plan::InitialShardBytes(int shard) const {
  int64_t elements = 0;
  for (const Bucket& bucket : buckets_) elements += bucket.size(shard);
  return elements * BytesPerElement(Format::kFp32);
}

}  // namespace shardmesh
