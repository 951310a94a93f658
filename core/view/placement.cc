#include "core/view/placement.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Kind = DimPlacement::Kind;

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

absl::Status CheckCount(const Mesh& mesh, size_t placements) {
  const std::vector<std::string> names = mesh.Names();
  if (names.size() == placements) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("placement: ", placements, " are given for the mesh dimensions ",
                                                 absl::StrJoin(names, ", "), "; give one for each"));
}

bool SameFlat(const DimPlacement& a, const DimPlacement& b) {
  return a.granule == b.granule && a.space_elements == b.space_elements && a.first_element == b.first_element;
}

}  // namespace

std::string DimPlacement::ToString() const {
  switch (kind) {
    case Kind::kReplicate:
      return "Replicate";
    case Kind::kShard:
      return absl::StrCat("Shard(", dim, ")");
    case Kind::kStridedShard:
      return absl::StrCat("StridedShard(", dim, ", ", split_factor, ")");
    case Kind::kOwned:
      return absl::StrCat("Owned(", owner, ")");
    case Kind::kFlat:
      if (space_elements == 0 && first_element == 0) return absl::StrCat("Flat(", granule, ")");
      return absl::StrCat("FlatIn(", granule, ", ", space_elements, ", ", first_element, ")");
    case Kind::kPartial:
      return "Partial";
  }
  return absl::StrCat("placement kind ", static_cast<int>(kind));
}

absl::StatusOr<std::vector<DimPlacement>> PlaceAlong(const Mesh& mesh,
                                                     const std::vector<std::pair<std::string, DimPlacement>>& named) {
  const std::vector<std::string> names = mesh.Names();
  std::vector<DimPlacement> placements(names.size());
  std::vector<bool> taken(names.size());
  for (const auto& [name, placement] : named) {
    RETURN_IF_ERROR(Annotate(mesh.SizeOf(name).status(), absl::StrCat("placement: ", placement.ToString())));
    const size_t d = absl::c_find(names, name) - names.begin();
    if (taken[d]) {
      return absl::InvalidArgumentError(absl::StrCat("placement: the mesh dimension ", name, " is named twice, for ",
                                                     placements[d].ToString(), " and ", placement.ToString(),
                                                     "; name it once"));
    }
    taken[d] = true;
    placements[d] = placement;
  }
  return placements;
}

absl::StatusOr<PlacedTensor> PlacedTensor::Create(Dims shape, const Mesh& mesh,
                                                  absl::Span<const DimPlacement> placements) {
  RETURN_IF_ERROR(ValidateShape(shape));
  RETURN_IF_ERROR(CheckCount(mesh, placements.size()));
  const std::vector<MeshAxis> axes = mesh.Axes();
  PlacedTensor placed(std::move(shape));
  placed.num_mesh_dims_ = static_cast<int>(axes.size());
  for (int d = placed.num_mesh_dims_; d-- > 0;) {  // from the right: a split factor counts what lies further right
    const absl::Status added = placed.Add(d, placements[d], axes[d].size);
    if (!added.ok()) {
      return Annotate(added, absl::StrCat("placement: ", placements[d].ToString(), " over the mesh dimension ",
                                          axes[d].name, " of size ", axes[d].size));
    }
  }
  absl::c_reverse(placed.replicated_);
  absl::c_reverse(placed.flat_dims_);
  if (placed.is_flat()) RETURN_IF_ERROR(placed.CheckFlat());
  return placed;
}

absl::Status PlacedTensor::Add(int mesh_dim, const DimPlacement& placement, int64_t size) {
  switch (placement.kind) {
    case Kind::kReplicate:
      replicated_.push_back(mesh_dim);
      return absl::OkStatus();
    case Kind::kShard:
      return AddSplit({placement.dim, mesh_dim, size}, 1);
    case Kind::kStridedShard:
      return AddSplit({placement.dim, mesh_dim, size}, placement.split_factor);
    case Kind::kOwned:
      owners_.push_back({mesh_dim, placement.owner});
      if (placement.owner >= 0 && placement.owner < size) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrCat("no such coordinate; they count from 0 to ", size - 1));
    case Kind::kFlat:
      return AddFlat(mesh_dim, placement, size);
    case Kind::kPartial:
      return absl::InvalidArgumentError("sums that are not reduced yet are no storage; reduce first, then place");
  }
  return absl::InvalidArgumentError("unknown kind of placement; take one of those that core/view/placement.h lists");
}

absl::Status PlacedTensor::AddSplit(const Split& split, int64_t split_factor) {
  if (split.tensor_dim < 0 || split.tensor_dim >= static_cast<int>(shape_.size())) {
    return absl::InvalidArgumentError(shape_.empty() ? "a scalar has no dimension to shard"
                                                     : absl::StrCat("the tensor [", absl::StrJoin(shape_, ", "),
                                                                    "] has no such dimension; they count from 0 to ",
                                                                    shape_.size() - 1));
  }
  const auto before = [](const Split& a, int dim) { return a.tensor_dim < dim; };
  auto place = std::lower_bound(splits_.begin(), splits_.end(), split.tensor_dim, before);
  std::vector<int64_t> factors = {1};  // of the places: in front of all later shards, behind the first of them, ...
  for (; factors.back() != split_factor; ++place) {
    if (place == splits_.end() || place->tensor_dim != split.tensor_dim) {
      return absl::InvalidArgumentError(
          absl::StrCat("the split factor must be what mesh dimensions further right shard dimension ", split.tensor_dim,
                       " into before this one does; here that can be ", absl::StrJoin(factors, " or ")));
    }
    factors.push_back(factors.back() * place->ways);
  }
  splits_.insert(place, split);
  return absl::OkStatus();
}

absl::Status PlacedTensor::AddFlat(int mesh_dim, const DimPlacement& placement, int64_t size) {
  if (is_flat() && !SameFlat(flat_, placement)) {
    return absl::InvalidArgumentError(absl::StrCat("another mesh dimension has ", flat_.ToString(),
                                                   "; flat dimensions cut one space together, so give both the same"));
  }
  flat_ = placement;
  flat_dims_.push_back({mesh_dim, size});
  num_shards_ *= size;
  return absl::OkStatus();
}

absl::Status PlacedTensor::CheckFlat() const {
  const auto bad = [&](absl::string_view what, int64_t have, absl::string_view right) {
    return absl::InvalidArgumentError(
        absl::StrCat("placement: ", flat_.ToString(), ": ", what, " is ", have, "; it must be ", right));
  };
  const int64_t granule = flat_.granule, space = flat_.space_elements, first = flat_.first_element;
  if (granule < 1 || granule > kMaxGranule) return bad("the granule", granule, absl::StrCat("1 to ", kMaxGranule));
  if (space < 0 || space > kMaxElements) return bad("the space", space, "0 (the tensor's own) to 2^62 elements");
  if (first < 0 || first % granule != 0) return bad("the first element", first, "a multiple of the granule");
  const int64_t largest = ChunkAt(Coordinates(num_mesh_dims_, 0)).NumElements();
  if (space == 0 && first == 0) return absl::OkStatus();
  if (first > space || largest > space - first) {
    return bad("the space", space, absl::StrCat("at least ", largest, " behind the first element ", first));
  }
  return absl::OkStatus();
}

bool PlacedTensor::Holds(const Coordinates& at) const {
  return absl::c_all_of(owners_, [&](const Along& owner) { return at[owner.mesh_dim] == owner.value; });
}

// Shard.local_shard_size_and_offset, once for each split.
Box PlacedTensor::ChunkAt(const Coordinates& at) const {
  Box chunk = Box::Whole(shape_);
  for (const Split& split : splits_) {
    int64_t& offset = chunk.offsets[split.tensor_dim];
    int64_t& size = chunk.sizes[split.tensor_dim];
    const int64_t each = CeilDivide(size, split.ways);
    const int64_t begin = std::min(size, each * at[split.mesh_dim]);
    size = std::min(size - begin, each);
    offset = size == 0 ? shape_[split.tensor_dim] : offset + begin;
  }
  return chunk;
}

int64_t PlacedTensor::ShardElements(const Box& chunk) const {
  const int64_t space = flat_.space_elements != 0 ? flat_.space_elements : chunk.NumElements();
  return CeilDivide(CeilDivide(space, num_shards_), flat_.granule) * flat_.granule;
}

int64_t PlacedTensor::ShardAt(const Coordinates& at) const {
  int64_t shard = 0;
  for (const Along& dim : flat_dims_) shard = shard * dim.value + at[dim.mesh_dim];
  return shard;
}

std::vector<LocalBox> PlacedTensor::BoxesAt(const Coordinates& at) const {
  std::vector<LocalBox> boxes;
  if (!Holds(at)) return boxes;
  const Box chunk = ChunkAt(at);
  if (!is_flat()) return {{chunk, 0, RowMajorStrides(chunk.sizes)}};
  const int64_t each = ShardElements(chunk), elements = chunk.NumElements();
  const int64_t shard_begin = each * ShardAt(at) - flat_.first_element;  // in the chunk's flat index; may be negative
  const int64_t begin = std::clamp<int64_t>(shard_begin, 0, elements);
  const int64_t end = std::clamp<int64_t>(shard_begin + each, 0, elements);
  for (Box box : BoxesOfFlatRange(chunk.sizes, begin, end)) {
    for (size_t d = 0; d < box.offsets.size(); ++d) box.offsets[d] += chunk.offsets[d];
    boxes.push_back(Locate(at, box));
  }
  return boxes;
}

int64_t PlacedTensor::LocalElementsAt(const Coordinates& at) const {
  if (!Holds(at)) return 0;
  const Box chunk = ChunkAt(at);
  return is_flat() ? ShardElements(chunk) : chunk.NumElements();
}

LocalBox PlacedTensor::Locate(const Coordinates& at, const Box& part) const {
  const Box chunk = ChunkAt(at);
  LocalBox whole{chunk, 0, RowMajorStrides(chunk.sizes)};
  if (is_flat()) whole.offset = flat_.first_element - ShardElements(chunk) * ShardAt(at);
  return whole.Part(part);
}

struct PlacedTensor::Walk {
  const Box& want;
  Visitor visit;
  Box chunk;
  Coordinates at;
};

bool PlacedTensor::ForEachHolder(const Box& want, Visitor visit) const {
  if (want.IsEmpty()) return true;
  Walk walk{want, visit, Box::Whole(shape_), Coordinates(num_mesh_dims_, 0)};
  for (const Along& owner : owners_) walk.at[owner.mesh_dim] = owner.value;
  return Descend(0, &walk);
}

// Takes the split's coordinates whose chunks overlap `want` (there is one at least) and goes on with each.
bool PlacedTensor::Descend(size_t index, Walk* walk) const {
  if (index == splits_.size()) {
    return is_flat() ? VisitShards(walk) : walk->visit(walk->at, Intersection(walk->want, walk->chunk));
  }
  const Split& split = splits_[index];
  const int dim = split.tensor_dim;
  const int64_t offset = walk->chunk.offsets[dim], size = walk->chunk.sizes[dim];
  const int64_t each = CeilDivide(size, split.ways);
  const int64_t begin = std::max<int64_t>(walk->want.offsets[dim] - offset, 0);
  const int64_t end = std::min(walk->want.offsets[dim] + walk->want.sizes[dim] - offset, size);
  bool go_on = true;
  for (int64_t c = begin / each; go_on && c * each < end; ++c) {
    walk->at[split.mesh_dim] = c;
    walk->chunk.offsets[dim] = offset + c * each;
    walk->chunk.sizes[dim] = std::min(each, size - c * each);
    go_on = Descend(index + 1, walk);
  }
  walk->chunk.offsets[dim] = offset;
  walk->chunk.sizes[dim] = size;
  return go_on;
}

// Of the chunk's flat shards, goes from each that has elements of `want` to the next that has.
bool PlacedTensor::VisitShards(Walk* walk) const {
  const Box& chunk = walk->chunk;
  Box part = Intersection(walk->want, chunk);
  for (size_t d = 0; d < part.offsets.size(); ++d) part.offsets[d] -= chunk.offsets[d];
  const int64_t each = ShardElements(chunk), elements = chunk.NumElements(), first = flat_.first_element;
  for (auto next = NextInBox(chunk.sizes, part, 0); next.has_value();) {
    int64_t shard = (first + *next) / each;
    const int64_t begin = std::max<int64_t>(shard * each - first, 0),
                  end = std::min(shard * each + each - first, elements);
    for (auto dim = flat_dims_.rbegin(); dim != flat_dims_.rend(); shard /= dim->value, ++dim) {
      walk->at[dim->mesh_dim] = shard % dim->value;
    }
    for (const Box& box : BoxesOfFlatRange(chunk.sizes, begin, end)) {
      Box both = Intersection(part, box);
      if (both.IsEmpty()) continue;
      for (size_t d = 0; d < both.offsets.size(); ++d) both.offsets[d] += chunk.offsets[d];
      if (!walk->visit(walk->at, both)) return false;
    }
    next = NextInBox(chunk.sizes, part, end);
  }
  return true;
}

bool PlacedTensor::ShardsAlike(const PlacedTensor& other, int dim) const {
  const auto of_dim = [dim](const Splits& splits) {
    Splits kept;
    absl::c_copy_if(splits, std::back_inserter(kept), [dim](const Split& s) { return s.tensor_dim == dim; });
    return kept;
  };
  return of_dim(splits_) == of_dim(other.splits_);
}

absl::StatusOr<std::vector<LocalBox>> BoxesOf(const Dims& shape, const Mesh& mesh,
                                              absl::Span<const DimPlacement> placements, Rank rank) {
  ASSIGN_OR_RETURN(const PlacedTensor placed, PlacedTensor::Create(shape, mesh, placements));
  ASSIGN_OR_RETURN(const Coordinates at, mesh.CoordinatesOf(rank));
  return placed.BoxesAt(at);
}

absl::StatusOr<std::vector<Rank>> ReplicasOf(const Mesh& mesh, absl::Span<const DimPlacement> placements, Rank rank) {
  RETURN_IF_ERROR(CheckCount(mesh, placements.size()));
  ASSIGN_OR_RETURN(Coordinates at, mesh.CoordinatesOf(rank));
  const std::vector<int64_t> sizes = mesh.Sizes();
  int64_t copies = 1;  // in one instance
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (placements[d].kind == Kind::kReplicate) copies *= sizes[d];
  }
  std::vector<Rank> replicas;
  for (int64_t i = 0; i < mesh.NumInstances() * copies; ++i) {
    int64_t rest = i % copies;
    for (size_t d = sizes.size(); d-- > 0;) {
      if (placements[d].kind != Kind::kReplicate) continue;
      at[d] = rest % sizes[d];
      rest /= sizes[d];
    }
    ASSIGN_OR_RETURN(const Rank replica, mesh.RankAt(at, i / copies));
    replicas.push_back(replica);
  }
  return replicas;
}

}  // namespace shardmesh
