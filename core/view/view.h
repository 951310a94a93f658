// TensorView: which rank holds which boxes of one tensor, and where in its memory. A view of many tensors is a
// std::vector<TensorView>, the same tensors in the same order wherever two views meet (core/view/reshard.h).
//
// Four ways to hold a tensor:
//   Placed   by placements over a mesh (core/view/placement.h).
//   Part     one part of a packed tensor, placed as if it were a tensor, in memory of its own; the boxes are those of
//            the stored tensor. So a reader takes q out of a stored qkv, whatever that is sharded by.
//   Packed   every part placed by itself, the local parts side by side in one local tensor: what a rank of tensor
//            parallelism holds of a packed qkv ([q_r; k_r; v_r]) or gate-up, where Shard(0) of the whole would cut
//            wrong.
//   Listed   any boxes, rank by rank.
// It knows no names and moves nothing. Immutable, thread-safe, cheap to copy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/mesh/mesh.h"
#include "core/view/box.h"
#include "core/view/box_parts.h"
#include "core/view/placement.h"

namespace shardmesh {

inline constexpr int64_t kMaxCheckedRuns = int64_t{1} << 20;  // of all ranks of a Listed together

// A box, who holds it, and where.
struct RankBox {
  Rank rank;
  LocalBox local;
};

class TensorView {
 public:
  // Errors as PlacedTensor::Create.
  static absl::StatusOr<TensorView> Placed(const Dims& shape, const Mesh& mesh,
                                           absl::Span<const DimPlacement> placements);

  // `part` is a box of the tensor `shape`. Errors as Placed and ValidateBox.
  static absl::StatusOr<TensorView> Part(const Dims& shape, const Box& part, const Mesh& mesh,
                                         absl::Span<const DimPlacement> placements);

  // `placements`: by part, in the order of packed.parts(). `join_dim`: the dimension along which local parts lie side
  // by side, in that order.
  // Errors as Placed, with the part's name.
  // InvalidArgument: another number of placements than of parts; a join_dim that the tensor lacks; a flat part; parts
  //   that differ along another dimension than join_dim, in size or in the way it is sharded.
  static absl::StatusOr<TensorView> Packed(const PackedParts& packed, int join_dim, const Mesh& mesh,
                                           const std::vector<std::vector<DimPlacement>>& placements);

  // A rank may be listed with several boxes, also empty ones, or among the `boxless` ranks, which have a part in the
  // tensor but hold none of it. One that is not listed has no part in it.
  // Errors as ValidateLocalBox; InvalidArgument also: a negative rank; two boxes of one rank overlap, or share a place
  // in its memory (both are named).
  // REQUIRES: boxes of one rank that reach into each other in its memory, and have more than kMaxCheckedRuns runs of
  // consecutive elements, share no place there. All others are checked.
  static absl::StatusOr<TensorView> Listed(const Dims& shape, std::vector<RankBox> boxes,
                                           std::vector<Rank> boxless = {});

  const Dims& shape() const { return shape_; }

  // The boxes of `rank`, disjoint; a shard that is empty may show as an empty box (with its offset), or as none.
  // NotFound: it is not in the mesh, or not listed.
  absl::StatusOr<std::vector<LocalBox>> BoxesOf(Rank rank) const;

  // OK if elements can be read from here: the boxes of two ranks are equal (replicas) or disjoint. InvalidArgument with
  // two that are neither; only Listed can be so.
  absl::Status CanBeSource() const;

  // Where `reader` takes the elements of `want` from: calls `visit` with disjoint boxes that make up `want`, less what
  // nobody holds, until it returns false; whether it never did. Of replicas it is the reader itself if it is one, else
  // number (reader modulo their number). The cost is that of the calls, whatever the number of ranks; with Listed also
  // the logarithm of theirs. REQUIRES: CanBeSource() is OK; want lies in the shape.
  using Visitor = absl::FunctionRef<bool(Rank, const LocalBox&)>;
  bool ForEachSource(const Box& want, Rank reader, Visitor visit) const;

  class Holders;  // one way to hold a tensor

 private:
  TensorView(Dims shape, std::shared_ptr<const Holders> holders);

  Dims shape_;
  std::shared_ptr<const Holders> holders_;
};

}  // namespace shardmesh
