#include "core/view/view.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/view/view_holders.h"

namespace shardmesh {
namespace {

// Two parts that are to lie side by side along `join_dim`.
absl::Status CheckJoinable(const NamedBox& a, const PlacedTensor& placed_a, const NamedBox& b,
                           const PlacedTensor& placed_b, int join_dim) {
  for (int d = 0; d < static_cast<int>(a.box.sizes.size()); ++d) {
    if (d == join_dim) continue;
    if (a.box.sizes[d] == b.box.sizes[d] && placed_a.ShardsAlike(placed_b, d)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "view: the parts \"", absl::CHexEscape(a.name), "\" ", a.box.ToString(), " and \"", absl::CHexEscape(b.name),
        "\" ", b.box.ToString(), " differ along dimension ", d, " in size or sharding; to lie side by side along ",
        join_dim, " they must agree along all others"));
  }
  return absl::OkStatus();
}

absl::Status CheckRank(Rank rank) {
  if (rank >= Rank(0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("view: rank ", rank.value(), " is negative; ranks count from 0"));
}

absl::Status CheckDisjointByRank(std::vector<RankBox>* boxes) {
  absl::c_stable_sort(*boxes, [](const RankBox& a, const RankBox& b) { return a.rank < b.rank; });
  for (auto begin = boxes->begin(); begin != boxes->end();) {
    std::vector<Box> of_rank;
    auto end = begin;
    for (; end != boxes->end() && end->rank == begin->rank; ++end) of_rank.push_back(end->local.box);
    const BoxIndex index(std::move(of_rank));
    if (const auto overlap = index.FirstOverlap()) {
      return absl::InvalidArgumentError(absl::StrCat("view: the boxes ", index.boxes()[overlap->first].ToString(),
                                                     " and ", index.boxes()[overlap->second].ToString(), " of rank ",
                                                     begin->rank.value(), " overlap; a rank holds an element once"));
    }
    begin = end;
  }
  return absl::OkStatus();
}

// Elements [begin, end) of a rank's memory that a box takes up, maybe with gaps.
struct Taken {
  int64_t begin = 0, end = 0;
  size_t box = 0;
};

int64_t EndOf(const LocalBox& local) {
  int64_t last = local.offset;
  for (size_t d = 0; d < local.strides.size(); ++d) last += (local.box.sizes[d] - 1) * local.strides[d];
  return last + 1;
}

// The dimensions of a box that are left when those that go on in memory are joined, fastest first, as (stride, size).
// The first has stride 1, and may be of size 1.
std::vector<std::pair<int64_t, int64_t>> Loops(const LocalBox& local) {
  std::vector<std::pair<int64_t, int64_t>> all, loops = {{1, 1}};
  for (size_t d = 0; d < local.strides.size(); ++d) {
    if (local.box.sizes[d] > 1) all.emplace_back(local.strides[d], local.box.sizes[d]);
  }
  absl::c_sort(all);
  for (const auto& [stride, size] : all) {
    int64_t next;  // beyond 64 bits: no stride that it could be
    const bool joins = !__builtin_mul_overflow(loops.back().first, loops.back().second, &next) && next == stride;
    if (joins) {
      loops.back().second *= size;
    } else {
      loops.emplace_back(stride, size);
    }
  }
  return loops;
}

// Appends the runs of consecutive elements of a box, if they are `room` or fewer; whether they are.
bool AppendRuns(const LocalBox& local, size_t box, int64_t room, std::vector<Taken>* runs) {
  const auto loops = Loops(local);
  int64_t count = 1;
  for (size_t l = 1; l < loops.size(); ++l) {
    if (__builtin_mul_overflow(count, loops[l].second, &count) || count > room) return false;
  }
  const size_t first = runs->size();
  runs->push_back({local.offset, local.offset + loops[0].second, box});
  for (size_t l = 1; l < loops.size(); ++l) {
    const size_t end = runs->size();
    for (int64_t i = 1; i < loops[l].second; ++i) {
      for (size_t r = first; r < end; ++r) {
        const int64_t by = i * loops[l].first;
        runs->push_back({(*runs)[r].begin + by, (*runs)[r].end + by, box});
      }
    }
  }
  return true;
}

// Two of these that share an element. REQUIRES: ascending by begin.
std::optional<std::pair<size_t, size_t>> FirstShared(const std::vector<Taken>& taken) {
  for (size_t i = 1, widest = 0; i < taken.size(); ++i) {
    if (taken[i].begin < taken[widest].end) return std::make_pair(taken[widest].box, taken[i].box);
    if (taken[i].end > taken[widest].end) widest = i;
  }
  return std::nullopt;
}

void SortByBegin(std::vector<Taken>* taken) {
  absl::c_sort(*taken, [](const Taken& a, const Taken& b) { return a.begin < b.begin; });
}

// Two of these boxes of one rank that share a place in its memory, if that shows without looking at more than *room
// runs, of which those looked at are taken off.
std::optional<std::pair<size_t, size_t>> FirstSharedPlace(absl::Span<const RankBox> boxes, int64_t* room) {
  std::vector<Taken> spans;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const LocalBox& local = boxes[i].local;
    if (!local.box.IsEmpty()) spans.push_back({local.offset, EndOf(local), i});
  }
  SortByBegin(&spans);
  for (size_t i = 0; i < spans.size();) {  // those that reach into each other, a group at a time
    std::vector<Taken> runs;
    int64_t end = spans[i].end;
    bool all = true;
    const size_t first = i;
    for (; i < spans.size() && (i == first || spans[i].begin < end); ++i) end = std::max(end, spans[i].end);
    if (i == first + 1) continue;
    for (size_t s = first; s < i && all; ++s) {
      const int64_t left = *room - static_cast<int64_t>(runs.size());
      all = AppendRuns(boxes[spans[s].box].local, spans[s].box, left, &runs);
    }
    *room -= static_cast<int64_t>(runs.size());
    if (!all) continue;
    SortByBegin(&runs);
    if (const auto shared = FirstShared(runs)) return shared;
  }
  return std::nullopt;
}

// REQUIRES: ascending by rank.
absl::Status CheckPlacesByRank(const std::vector<RankBox>& boxes) {
  int64_t room = kMaxCheckedRuns;
  for (size_t begin = 0, end = 0; begin < boxes.size(); begin = end) {
    while (end < boxes.size() && boxes[end].rank == boxes[begin].rank) ++end;
    const auto of_rank = absl::MakeSpan(boxes).subspan(begin, end - begin);
    const auto shared = FirstSharedPlace(of_rank, &room);
    if (!shared.has_value()) continue;
    const LocalBox &a = of_rank[shared->first].local, &b = of_rank[shared->second].local;
    return absl::InvalidArgumentError(absl::StrCat(
        "view: the boxes ", a.box.ToString(), " at offset ", a.offset, " and ", b.box.ToString(), " at offset ",
        b.offset, " of rank ", of_rank[0].rank.value(), " share places in its memory; give each its own"));
  }
  return absl::OkStatus();
}

}  // namespace

TensorView::TensorView(Dims shape, std::shared_ptr<const Holders> holders)
    : shape_(std::move(shape)), holders_(std::move(holders)) {}

absl::StatusOr<TensorView> TensorView::Placed(const Dims& shape, const Mesh& mesh,
                                              absl::Span<const DimPlacement> placements) {
  return Part(shape, Box::Whole(shape), mesh, placements);
}

absl::StatusOr<TensorView> TensorView::Part(const Dims& shape, const Box& part, const Mesh& mesh,
                                            absl::Span<const DimPlacement> placements) {
  RETURN_IF_ERROR(ValidateBox(part, shape));
  ASSIGN_OR_RETURN(PlacedTensor placed, PlacedTensor::Create(part.sizes, mesh, placements));
  std::vector<PlacedPart> parts;
  parts.push_back({part, std::move(placed)});
  return TensorView(shape, std::make_shared<const PlacedHolders>(mesh, std::move(parts), 0));
}

absl::StatusOr<TensorView> TensorView::Packed(const PackedParts& packed, int join_dim, const Mesh& mesh,
                                              const std::vector<std::vector<DimPlacement>>& placements) {
  const std::vector<NamedBox>& named = packed.parts();
  if (placements.size() != named.size()) {
    return absl::InvalidArgumentError(absl::StrCat("view: placements of ", placements.size(), " parts for a tensor of ",
                                                   named.size(), " parts; give one list for each"));
  }
  if (join_dim < 0 || join_dim >= static_cast<int>(packed.shape().size())) {
    return absl::InvalidArgumentError(absl::StrCat("view: no dimension ", join_dim, " to lie side by side along; the ",
                                                   "tensor has ", packed.shape().size()));
  }
  std::vector<PlacedPart> parts;
  for (size_t i = 0; i < named.size(); ++i) {
    auto placed = PlacedTensor::Create(named[i].box.sizes, mesh, placements[i]);
    if (!placed.ok()) return Annotate(placed.status(), absl::StrCat("part \"", absl::CHexEscape(named[i].name), "\""));
    if (placed->is_flat() && named.size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat("view: the part \"", absl::CHexEscape(named[i].name),
                                                     "\" is flat; only boxes can lie side by side in one tensor"));
    }
    if (i > 0) RETURN_IF_ERROR(CheckJoinable(named[0], parts[0].placed, named[i], *placed, join_dim));
    parts.push_back({named[i].box, *std::move(placed)});
  }
  return TensorView(packed.shape(), std::make_shared<const PlacedHolders>(mesh, std::move(parts), join_dim));
}

absl::StatusOr<TensorView> TensorView::Listed(const Dims& shape, std::vector<RankBox> boxes,
                                              std::vector<Rank> boxless) {
  RETURN_IF_ERROR(ValidateShape(shape));
  for (const Rank rank : boxless) RETURN_IF_ERROR(CheckRank(rank));
  for (const RankBox& box : boxes) {
    RETURN_IF_ERROR(CheckRank(box.rank));
    RETURN_IF_ERROR(Annotate(ValidateLocalBox(box.local, shape), absl::StrCat("view: rank ", box.rank.value())));
  }
  RETURN_IF_ERROR(CheckDisjointByRank(&boxes));
  RETURN_IF_ERROR(CheckPlacesByRank(boxes));
  return TensorView(shape, std::make_shared<const ListedHolders>(std::move(boxes), std::move(boxless)));
}

absl::StatusOr<std::vector<LocalBox>> TensorView::BoxesOf(Rank rank) const { return holders_->BoxesOf(rank); }

absl::Status TensorView::CanBeSource() const { return holders_->CanBeSource(); }

bool TensorView::ForEachSource(const Box& want, Rank reader, Visitor visit) const {
  return holders_->ForEachSource(want, reader, visit);
}

}  // namespace shardmesh
