#include "core/view.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "core/view_holders.h"

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
  return TensorView(shape, std::make_shared<const ListedHolders>(std::move(boxes), std::move(boxless)));
}

absl::StatusOr<std::vector<LocalBox>> TensorView::BoxesOf(Rank rank) const { return holders_->BoxesOf(rank); }

absl::Status TensorView::CanBeSource() const { return holders_->CanBeSource(); }

bool TensorView::ForEachSource(const Box& want, Rank reader, Visitor visit) const {
  return holders_->ForEachSource(want, reader, visit);
}

}  // namespace shardmesh
