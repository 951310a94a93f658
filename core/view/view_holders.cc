#include "core/view/view_holders.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

Box Shifted(Box box, const Dims& by, int sign) {
  for (size_t d = 0; d < by.size(); ++d) box.offsets[d] += sign * by[d];
  return box;
}

bool RankBefore(const RankBox& box, Rank rank) { return box.rank < rank; }

std::vector<RankBox> SortedByBox(std::vector<RankBox> boxes) {
  absl::c_sort(boxes, [](const RankBox& a, const RankBox& b) {
    return std::tie(a.local.box.offsets, a.local.box.sizes, a.rank) <
           std::tie(b.local.box.offsets, b.local.box.sizes, b.rank);
  });
  return boxes;
}

std::vector<size_t> Firsts(const std::vector<RankBox>& by_box) {
  std::vector<size_t> first;
  for (size_t i = 0; i < by_box.size(); ++i) {
    if (i == 0 || by_box[i].local.box != by_box[i - 1].local.box) first.push_back(i);
  }
  first.push_back(by_box.size());
  return first;
}

std::vector<Box> Distinct(const std::vector<RankBox>& by_box, const std::vector<size_t>& first) {
  std::vector<Box> distinct;
  for (size_t i = 0; i + 1 < first.size(); ++i) distinct.push_back(by_box[first[i]].local.box);
  return distinct;
}

}  // namespace

PlacedHolders::PlacedHolders(Mesh mesh, std::vector<PlacedPart> parts, int join_dim)
    : mesh_(std::move(mesh)), mesh_sizes_(mesh_.Sizes()), parts_(std::move(parts)), join_dim_(join_dim) {}

std::vector<int64_t> PlacedHolders::StartsAt(const Coordinates& at) const {
  std::vector<int64_t> starts(1, 0);
  if (parts_.size() == 1) return starts;
  for (const PlacedPart& part : parts_) {
    const int64_t size = part.placed.Holds(at) ? part.placed.ChunkAt(at).sizes[join_dim_] : 0;
    starts.push_back(starts.back() + size);
  }
  return starts;
}

LocalBox PlacedHolders::Joined(size_t part, const std::vector<int64_t>& starts, const Coordinates& at,
                               const Box& piece) const {
  if (parts_.size() == 1) return parts_[0].placed.Locate(at, piece);
  LocalBox whole{parts_[part].placed.ChunkAt(at)};
  Dims joined = whole.box.sizes;
  joined[join_dim_] = starts.back();
  whole.strides = RowMajorStrides(joined);
  whole.offset = starts[part] * whole.strides[join_dim_];
  return whole.Part(piece);
}

absl::StatusOr<std::vector<LocalBox>> PlacedHolders::BoxesOf(Rank rank) const {
  ASSIGN_OR_RETURN(const Coordinates at, mesh_.CoordinatesOf(rank));
  const std::vector<int64_t> starts = StartsAt(at);
  std::vector<LocalBox> boxes;
  for (size_t p = 0; p < parts_.size(); ++p) {
    for (LocalBox& local : parts_[p].placed.BoxesAt(at)) {
      if (parts_.size() > 1) local = Joined(p, starts, at, local.box);
      local.box = Shifted(local.box, parts_[p].box.offsets, 1);
      boxes.push_back(std::move(local));
    }
  }
  return boxes;
}

int64_t PlacedHolders::NumReplicas(const PlacedTensor& placed) const {
  int64_t replicas = mesh_.NumInstances();
  for (const int d : placed.replicated()) replicas *= mesh_sizes_[d];
  return replicas;
}

// The replica of the replica that serves `reader`, of those that differ from `at` along replicated dimensions.
PlacedHolders::Replica PlacedHolders::Choose(const PlacedTensor& placed, const Coordinates& at, Rank reader) const {
  Replica replica{0, at};
  const int64_t replicas = NumReplicas(placed);
  if (replicas == 1) return replica;
  auto own = mesh_.CoordinatesOf(reader);
  if (own.ok()) {
    for (const int d : placed.replicated()) replica.at[d] = (*own)[d];
    if (replica.at == *own) return {*mesh_.InstanceOf(reader), *std::move(own)};
  }
  int64_t choice = reader.value() % replicas;
  for (auto d = placed.replicated().rbegin(); d != placed.replicated().rend(); ++d) {
    replica.at[*d] = choice % mesh_sizes_[*d];
    choice /= mesh_sizes_[*d];
  }
  replica.instance = choice;
  return replica;
}

bool PlacedHolders::ForEachSource(const Box& want, Rank reader, TensorView::Visitor visit) const {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const PlacedPart& part = parts_[p];
    const Box inside = Intersection(want, part.box);
    if (inside.IsEmpty()) continue;
    const auto visit_piece = [&](const Coordinates& at, const Box& piece) {
      const Replica replica = Choose(part.placed, at, reader);
      LocalBox local = Joined(p, StartsAt(replica.at), replica.at, piece);
      local.box = Shifted(local.box, part.box.offsets, 1);
      return visit(*mesh_.RankAt(replica.at, replica.instance), local);
    };
    if (!part.placed.ForEachHolder(Shifted(inside, part.box.offsets, -1), visit_piece)) return false;
  }
  return true;
}

ListedHolders::ListedHolders(std::vector<RankBox> boxes, std::vector<Rank> boxless)
    : by_rank_(std::move(boxes)),
      boxless_(std::move(boxless)),
      by_box_(SortedByBox(by_rank_)),
      first_(Firsts(by_box_)),
      distinct_(Distinct(by_box_, first_)) {
  absl::c_stable_sort(by_rank_, [](const RankBox& a, const RankBox& b) { return a.rank < b.rank; });
  absl::c_sort(boxless_);
  if (const auto overlap = distinct_.FirstOverlap()) {
    const RankBox &a = by_box_[first_[overlap->first]], &b = by_box_[first_[overlap->second]];
    can_be_source_ = absl::InvalidArgumentError(absl::StrCat(
        "view: ", a.local.box.ToString(), " of rank ", a.rank.value(), " and ", b.local.box.ToString(), " of rank ",
        b.rank.value(), " overlap; to read from, the boxes of two ranks must be equal (replicas) or disjoint"));
  }
}

absl::StatusOr<std::vector<LocalBox>> ListedHolders::BoxesOf(Rank rank) const {
  std::vector<LocalBox> boxes;
  for (auto at = std::lower_bound(by_rank_.begin(), by_rank_.end(), rank, RankBefore);
       at != by_rank_.end() && at->rank == rank; ++at) {
    boxes.push_back(at->local);
  }
  if (!boxes.empty() || absl::c_binary_search(boxless_, rank)) return boxes;
  return absl::NotFoundError(
      absl::StrCat("view: rank ", rank.value(), " has no box, not even an empty one, in a list of ", by_rank_.size()));
}

bool ListedHolders::ForEachSource(const Box& want, Rank reader, TensorView::Visitor visit) const {
  return distinct_.ForEachOverlap(want, [&](size_t box) {
    const auto begin = by_box_.begin() + first_[box], end = by_box_.begin() + first_[box + 1];
    auto source = std::lower_bound(begin, end, reader, RankBefore);
    if (source == end || source->rank != reader) source = begin + reader.value() % (end - begin);
    return visit(source->rank, source->local.Part(Intersection(want, source->local.box)));
  });
}

}  // namespace shardmesh
