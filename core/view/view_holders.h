// The ways to hold a tensor, behind TensorView: contracts there. For core/view/view*.cc alone.
// Immutable, thread-safe.
#pragma once

#include <utility>
#include <vector>

#include "core/view/box_index.h"
#include "core/view/view.h"

namespace shardmesh {

class TensorView::Holders {
 public:
  virtual ~Holders() = default;
  virtual absl::StatusOr<std::vector<LocalBox>> BoxesOf(Rank rank) const = 0;
  virtual absl::Status CanBeSource() const { return absl::OkStatus(); }
  virtual bool ForEachSource(const Box& want, Rank reader, Visitor visit) const = 0;
};

// A part of a tensor, placed by itself.
struct PlacedPart {
  Box box;
  PlacedTensor placed;  // its coordinates begin at the box's offsets
};

// Parts over one mesh. With more than one, their local tensors are joined along `join_dim`.
class PlacedHolders : public TensorView::Holders {
 public:
  // REQUIRES: the parts are disjoint, and as TensorView::Packed wants them if they are several.
  PlacedHolders(Mesh mesh, std::vector<PlacedPart> parts, int join_dim);

  absl::StatusOr<std::vector<LocalBox>> BoxesOf(Rank rank) const override;
  bool ForEachSource(const Box& want, Rank reader, TensorView::Visitor visit) const override;

 private:
  // A rank's place in the mesh.
  struct Replica {
    int64_t instance = 0;
    Coordinates at;
  };

  int64_t NumReplicas(const PlacedTensor& placed) const;
  Replica Choose(const PlacedTensor& placed, const Coordinates& at, Rank reader) const;
  // Where each part begins in the joined local tensor, along join_dim_; behind them the tensor's end.
  std::vector<int64_t> StartsAt(const Coordinates& at) const;
  // Where `piece` of a part lies there. REQUIRES: starts = StartsAt(at); who is there holds the piece.
  LocalBox Joined(size_t part, const std::vector<int64_t>& starts, const Coordinates& at, const Box& piece) const;

  const Mesh mesh_;
  const std::vector<int64_t> mesh_sizes_;
  const std::vector<PlacedPart> parts_;
  const int join_dim_;
};

// Boxes rank by rank.
class ListedHolders : public TensorView::Holders {
 public:
  // REQUIRES: every box is valid in one shape; those of one rank are disjoint.
  ListedHolders(std::vector<RankBox> boxes, std::vector<Rank> boxless);

  absl::StatusOr<std::vector<LocalBox>> BoxesOf(Rank rank) const override;
  absl::Status CanBeSource() const override { return can_be_source_; }
  bool ForEachSource(const Box& want, Rank reader, TensorView::Visitor visit) const override;

 private:
  // Constant after construction.
  std::vector<RankBox> by_rank_;
  std::vector<Rank> boxless_;    // ascending
  std::vector<RankBox> by_box_;  // equal boxes together, by rank
  std::vector<size_t> first_;    // in by_box_: where the holders of each distinct box begin, and the end
  BoxIndex distinct_;
  absl::Status can_be_source_;
};

}  // namespace shardmesh
