// Placements: how one tensor is spread over a mesh, said once for each mesh dimension, and the arithmetic from there to
// boxes: which box lies at given mesh coordinates, and at which coordinates the elements of a given box lie.
//
//   Replicate            every rank along the dimension holds the same.
//   Shard(dim)           torch.chunk along a tensor dimension: of n elements over N ranks, rank r has
//                        [min(c r, n), min(c (r + 1), n)) with c = ceil(n / N); the last ranks are short or empty, an
//                        empty box has offset n (torch.distributed.tensor: Shard.local_shard_size_and_offset). Several
//                        mesh dimensions may shard one tensor dimension, each what the one before left. Ragged rows and
//                        expert parallelism are Shard(0) of the row or expert dimension.
//   StridedShard(dim, f) the same, but in another order: mesh dimensions further right, whose sizes multiply to f,
//   shard
//                        before this one. FSDP over tensor parallelism on a mesh (dp, tp) is (StridedShard(d, tp),
//                        Shard(d)). The order is that of torch's _StridedShard
//                        (DTensorSpec._maybe_convert_StridedShard_to_shard_order), and the boxes are those that
//                        fully_shard stores. For some uneven sizes (33 rows on 4 x 2) the offsets that DTensor computes
//                        (compute_local_shape_and_global_offset) contradict both; they are not followed.
//   Owned(coordinate)    the whole at one coordinate, nothing at the others.
//   Flat(granule)        what the other placements leave, as one flat row-major range, cut into equal shards of
//                        S = ceil(n / N / granule) granules, the last ones short or empty: an equal-unit RaggedShard
//                        (veScale). Several flat dimensions count as one, the first slowest. With FlatIn the range
//                        lies at [first, first + n) of a larger space of many tensors that is cut as a whole.
//   Partial              sums yet to be reduced; no storage, refused with the reason.
//
// In a holder's memory a box is row-major and dense; a flat shard is its part of the space, with its padding.
// All of it is integer arithmetic: no cost grows with the number of ranks.
// Immutable values, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/mesh/mesh.h"
#include "core/view/box.h"

namespace shardmesh {

inline constexpr int64_t kMaxGranule = int64_t{1} << 40;

// What one mesh dimension does to a tensor.
struct DimPlacement {
  enum class Kind { kReplicate, kShard, kStridedShard, kOwned, kFlat, kPartial };

  Kind kind = Kind::kReplicate;
  int dim = 0;                 // kShard, kStridedShard: the tensor's dimension
  int64_t split_factor = 1;    // kStridedShard
  int64_t owner = 0;           // kOwned: a coordinate
  int64_t granule = 1;         // kFlat: elements
  int64_t space_elements = 0;  // kFlat: of the space without padding; 0: it is the tensor's own
  int64_t first_element = 0;   // kFlat: where the tensor begins in the space, a multiple of the granule

  static DimPlacement Replicate() { return {}; }
  static DimPlacement Shard(int dim) { return {Kind::kShard, dim}; }
  static DimPlacement StridedShard(int dim, int64_t split_factor) { return {Kind::kStridedShard, dim, split_factor}; }
  static DimPlacement Owned(int64_t coordinate) { return {Kind::kOwned, 0, 1, coordinate}; }
  static DimPlacement Flat(int64_t granule) { return {Kind::kFlat, 0, 1, 0, granule}; }
  static DimPlacement FlatIn(int64_t granule, int64_t space_elements, int64_t first_element) {
    return {Kind::kFlat, 0, 1, 0, granule, space_elements, first_element};
  }
  static DimPlacement Partial() { return {Kind::kPartial}; }

  std::string ToString() const;  // "Shard(0)"
};

// Placements by mesh dimension's name, the others Replicate, in the order that the functions below take.
// NotFound: the mesh has no such dimension. InvalidArgument: one is named twice.
absl::StatusOr<std::vector<DimPlacement>> PlaceAlong(const Mesh& mesh,
                                                     const std::vector<std::pair<std::string, DimPlacement>>& named);

// One coordinate for each dimension of a mesh, as Mesh::CoordinatesOf has them.
using Coordinates = std::vector<int64_t>;

// One tensor over the coordinates of one mesh.
class PlacedTensor {
 public:
  // `placements`: one for each dimension of the mesh, in its order.
  // InvalidArgument: another number of placements; a tensor dimension that the tensor lacks; a split factor that no
  //   later shards of that dimension multiply to; an owner beyond the mesh dimension; a granule outside
  //   [1, kMaxGranule]; flat placements that differ, or whose space is too small or begins off the granule; Partial.
  // ResourceExhausted: as ValidateShape.
  static absl::StatusOr<PlacedTensor> Create(Dims shape, const Mesh& mesh, absl::Span<const DimPlacement> placements);

  // REQUIRES below: coordinates are those of a rank of the mesh.

  // Whether the rank has storage for the tensor: not away from its owner.
  bool Holds(const Coordinates& at) const;

  // What the placements other than Owned and Flat leave: one box, empty or not.
  Box ChunkAt(const Coordinates& at) const;

  // Where the elements at `at` lie in memory. One box, empty or not; with flat placements none to 2 D - 1, none empty,
  // ascending; none away from the owner.
  std::vector<LocalBox> BoxesAt(const Coordinates& at) const;

  // Elements of the memory that BoxesAt refers to, padding included.
  int64_t LocalElementsAt(const Coordinates& at) const;

  // The place in memory of `part`. REQUIRES: one of BoxesAt(at) contains it.
  LocalBox Locate(const Coordinates& at, const Box& part) const;

  // Calls `visit` with every non-empty part of `want` that some coordinates hold as part of one box, until it returns
  // false; whether it never did. Of the coordinates along `replicated()` dimensions 0 stands for all. The parts are
  // disjoint and make up `want`. The cost is that of the calls. REQUIRES: want lies in the shape.
  using Visitor = absl::FunctionRef<bool(const Coordinates&, const Box&)>;
  bool ForEachHolder(const Box& want, Visitor visit) const;

  // Mesh dimensions along which every rank holds the same, ascending.
  const absl::InlinedVector<int, 4>& replicated() const { return replicated_; }
  bool is_flat() const { return !flat_dims_.empty(); }

  // Whether a tensor dimension is sharded by the same mesh dimensions in the same order in both.
  bool ShardsAlike(const PlacedTensor& other, int dim) const;

 private:
  struct Split {
    int tensor_dim = 0, mesh_dim = 0;
    int64_t ways = 1;
    friend bool operator==(const Split& a, const Split& b) {
      return a.tensor_dim == b.tensor_dim && a.mesh_dim == b.mesh_dim && a.ways == b.ways;
    }
  };
  struct Along {
    int mesh_dim = 0;
    int64_t value = 0;  // of an owner its coordinate, of a flat dimension its size
  };
  using Splits = absl::InlinedVector<Split, 4>;
  struct Walk;  // the state of ForEachHolder

  explicit PlacedTensor(Dims shape) : shape_(std::move(shape)) {}

  absl::Status Add(int mesh_dim, const DimPlacement& placement, int64_t size);
  absl::Status AddSplit(const Split& split, int64_t split_factor);
  absl::Status AddFlat(int mesh_dim, const DimPlacement& placement, int64_t size);
  absl::Status CheckFlat() const;
  int64_t ShardElements(const Box& chunk) const;
  int64_t ShardAt(const Coordinates& at) const;
  bool Descend(size_t split, Walk* walk) const;
  bool VisitShards(Walk* walk) const;

  // Constant after Create.
  Dims shape_;
  int num_mesh_dims_ = 0;
  Splits splits_;  // by tensor dimension, then in the order in which they shard
  absl::InlinedVector<Along, 2> owners_;
  absl::InlinedVector<Along, 2> flat_dims_;  // slowest first
  int64_t num_shards_ = 1;                   // along all flat dimensions
  DimPlacement flat_;                        // what the flat dimensions have in common
  absl::InlinedVector<int, 4> replicated_;
};

// The boxes of one rank. Errors as PlacedTensor::Create; NotFound: `rank` is not in the mesh.
absl::StatusOr<std::vector<LocalBox>> BoxesOf(const Dims& shape, const Mesh& mesh,
                                              absl::Span<const DimPlacement> placements, Rank rank);

// The ranks that hold the same elements as `rank` by the placements, itself among them: those that differ along
// replicated dimensions or lie in another instance of the mesh. The first is the canonical one. Instances are slowest,
// then mesh dimensions in their order. InvalidArgument: another number of placements than of mesh dimensions.
// NotFound: `rank` is not in the mesh.
absl::StatusOr<std::vector<Rank>> ReplicasOf(const Mesh& mesh, absl::Span<const DimPlacement> placements, Rank rank);

}  // namespace shardmesh
