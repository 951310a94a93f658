// Mesh: which ranks of a job meet along which named dimension. An integer layout over ranks,
//   mesh = rank map + [(name, size, stride)],   rank at coordinates c = rank map[sum over d of c[d] * stride[d]],
// after the layouts of CuTe (NVIDIA CUTLASS, cute/layout.hpp). Every operation is arithmetic on that list, so a slice
// of a slice, a flattened slice, a transposed flattened slice, ... is a mesh again, always. (Where no strides describe
// the result, as when flattening distant dimensions, the rank map is written anew, in an order in which some do.)
//
// A slice keeps some dimensions and stands for ALL its instances, one for each choice of the coordinates left out;
// every rank sees the instance that it lies in. Slicing never loses a rank. Example, 2 x 2 x 2 named (ddp, fsdp, x):
//   Slice({"fsdp"}) has the instances [0 2] [1 3] [4 6] [5 7]; rank 5 sees [5 7].
//
// It says nothing about roles (core/mesh/mesh_spec.h) and opens no communicators.
// An immutable value: safe to use from many threads, cheap to copy (copies share the rank map).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"
#include "core/mesh/mesh_spec.h"  // IWYU pragma: export

namespace shardmesh {

// One dimension of a mesh. `stride` counts positions of the rank map between neighbours along it.
struct MeshAxis {
  std::string name;
  int64_t size = 1;
  int64_t stride = 1;
};

class Mesh {
 public:
  // A mesh of the given shape (first dimension slowest) over the ranks 0, 1, 2, ... or over `ranks`, in that order.
  // InvalidArgument: no dimension, sizes and names differ in number, a bad or repeated name, a size below 1, or `ranks`
  //   that are too few, too many, negative or repeated.
  // ResourceExhausted: more than kMaxMeshDims dimensions or kMaxMeshRanks ranks.
  static absl::StatusOr<Mesh> Create(const std::vector<int64_t>& shape, const std::vector<std::string>& names);
  static absl::StatusOr<Mesh> Create(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                                     std::vector<Rank> ranks);
  static absl::StatusOr<Mesh> Create(const MeshSpec& spec);

  // The dimensions of `parts` side by side, in this order. All parts come from one mesh, their root, by operations
  // below. Every rank keeps the coordinates that it has in each part and, along each dimension, the group that it has
  // there.
  //   Concatenate({cube.Slice({"x"}), cube.Slice({"ddp"})})  is (x, ddp) with the instances [0 4 1 5] [2 6 3 7]
  // Instances are ordered as their first ranks are in the root.
  // InvalidArgument: no part, parts whose roots have other ranks or another order, a dimension name twice, two ranks
  //   that meet along two of the parts (a dimension of the root is used twice), or groups that form no grid.
  // ResourceExhausted: more than kMaxMeshDims dimensions.
  static absl::StatusOr<Mesh> Concatenate(const std::vector<Mesh>& parts);

  // The operations. Common errors: NotFound: a name that is no dimension of this mesh (the message lists them).
  // InvalidArgument: a name given twice, or no name at all.

  // Keeps the named dimensions, in the order of `names`. The instances are the same whatever that order is, but for
  // the order of the ranks within each.
  absl::StatusOr<Mesh> Slice(const std::vector<std::string>& names) const;

  // The same dimensions in the order of `names`. InvalidArgument: `names` leaves one out.
  absl::StatusOr<Mesh> Transpose(const std::vector<std::string>& names) const;

  // Makes one dimension `into` of the named ones, adjacent or not: the first named varies slowest. It stands where the
  // slowest of them stands in this mesh. The other dimensions stay, or with `keep_rest` false are sliced away.
  // InvalidArgument: `into` is a bad name or that of a dimension that stays.
  absl::StatusOr<Mesh> Flatten(const std::vector<std::string>& names, absl::string_view into,
                               bool keep_rest = true) const;

  // Splits dimension `name` into `names` of `sizes`, the first slowest, in its place. InvalidArgument: sizes and names
  // differ in number, the product of the sizes is not the dimension's size, or a new name is bad or already taken.
  // ResourceExhausted: more than kMaxMeshDims dimensions.
  absl::StatusOr<Mesh> Unflatten(absl::string_view name, const std::vector<int64_t>& sizes,
                                 const std::vector<std::string>& names) const;

  // The mesh of the ranks `survivors` alone, in whatever order they are given: ranks and instances keep theirs. It is a
  // root of its own; slices of one mesh that are restricted to the same ranks still have one root. The survivors must
  // be a full grid: of each dimension some coordinates, and at these every rank, in each instance that has survivors.
  // InvalidArgument: no survivor, one that is given twice, or no full grid. The message names a rank that is missing,
  //   and the largest full grid that is left without some coordinates of one dimension.
  // NotFound: a rank that is not in the mesh.
  absl::StatusOr<Mesh> Restrict(const std::vector<Rank>& survivors) const;

  // The dimensions, slowest first. Their sizes alone, their names alone.
  std::vector<MeshAxis> Axes() const;
  std::vector<int64_t> Sizes() const;
  std::vector<std::string> Names() const;
  absl::StatusOr<int64_t> SizeOf(absl::string_view name) const;  // NotFound as above

  int64_t NumRanks() const;             // in all instances together: every rank the mesh was created with
  int64_t NumInstances() const;         // 1 unless this is a slice
  int64_t NumRanksPerInstance() const;  // the product of Sizes()

  // Every instance as its ranks, first dimension slowest. The instances are ordered by the coordinates left out, these
  // in the order their dimensions had (in what Concatenate and Restrict return, the instance so far is the first of
  // them). One after the other they name every rank once.
  std::vector<std::vector<Rank>> Instances() const;

  // Every list of ranks that differ only along `names`, the first named slowest, over all instances in their order.
  // Errors as for the operations.
  absl::StatusOr<std::vector<std::vector<Rank>>> Groups(const std::vector<std::string>& names) const;

  // What one rank sees. NotFound: `rank` is not in the mesh, or `name` is no dimension.
  absl::StatusOr<std::vector<int64_t>> CoordinatesOf(Rank rank) const;  // in its instance, one for each dimension
  absl::StatusOr<int64_t> InstanceOf(Rank rank) const;                  // index into Instances()
  absl::StatusOr<std::vector<Rank>> GroupOf(Rank rank, absl::string_view name) const;

  // The inverse of (InstanceOf, CoordinatesOf). OutOfRange: `instance` or a coordinate is not below its size.
  // InvalidArgument: another number of coordinates than dimensions.
  absl::StatusOr<Rank> RankAt(const std::vector<int64_t>& coordinates, int64_t instance = 0) const;

  // All that a mesh is, as plain values, for whoever stores or sends it. `ranks` by position, as the strides of `axes`
  // count them; `root`: the ranks of the mesh that it comes from, in that one's order.
  struct Axis {  // visible: a dimension of this mesh. Otherwise one that was sliced away; its name does not matter.
    MeshAxis layout;
    bool visible = true;
  };
  struct State {
    std::vector<Rank> root, ranks;
    std::vector<Axis> axes;  // in the mesh's own order, those sliced away in their places
  };
  State ToState() const;

  // The mesh that `state` is of: it answers as that one does, and is a part of the same root.
  // InvalidArgument, ResourceExhausted: as Create, or no mesh has this state (the message says what is wrong with it).
  static absl::StatusOr<Mesh> FromState(State state);

  // One line for logs: "mesh(ddp=2 stride 4, fsdp=2 stride 2) 2 instances of 4 ranks".
  std::string DebugString() const;

 private:
  struct RankMap;
  using Order = std::vector<const Axis*>;

  Mesh(std::shared_ptr<const RankMap> root, std::shared_ptr<const RankMap> ranks, std::vector<Axis> axes);

  absl::StatusOr<std::vector<size_t>> Find(const std::vector<std::string>& names) const;
  absl::StatusOr<size_t> Find(absl::string_view name) const;
  Order Pick(bool visible) const;
  Order InstanceMajor() const;
  std::vector<int32_t> Positions(const Order& order) const;
  std::vector<int32_t> RootPositions() const;
  std::vector<std::vector<Rank>> Chunks(const Order& order, int64_t chunk) const;
  std::vector<std::vector<Rank>> GroupsAlong(const std::vector<size_t>& along) const;
  Mesh With(std::vector<Axis> axes) const { return Mesh(root_, ranks_, std::move(axes)); }
  static Mesh RowMajor(std::shared_ptr<const RankMap> root, std::shared_ptr<const RankMap> ranks,
                       std::vector<MeshAxis> dims);
  Mesh Relabelled(const std::vector<size_t>& last) const;
  absl::StatusOr<int32_t> OrdinalOf(Rank rank) const;
  absl::StatusOr<int64_t> PositionOf(Rank rank) const;

  // Constant after construction. Sizes and strides of all axes together run over every position of the map once.
  std::shared_ptr<const RankMap> root_;  // of the mesh that this one comes from: the same ranks, maybe in another order
  std::shared_ptr<const RankMap> ranks_;
  std::vector<Axis> axes_;  // in the mesh's own order, those sliced away in their places
};

}  // namespace shardmesh
