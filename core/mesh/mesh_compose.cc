// Meshes made of others (core/mesh/mesh.h): several side by side, or the part of one that survived.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/mesh/mesh.h"
#include "core/mesh/mesh_rank_map.h"

namespace shardmesh {
namespace {

constexpr size_t kMaxListed = 8;

using Names = std::vector<std::string>;

std::vector<int32_t> Inverse(const std::vector<int32_t>& permutation) {
  std::vector<int32_t> inverse(permutation.size());
  for (size_t i = 0; i < permutation.size(); ++i) inverse[permutation[i]] = static_cast<int32_t>(i);
  return inverse;
}

// Where every rank lies in its instance of a mesh. Ranks are numbered by their position in the root.
struct Grid {
  std::vector<int32_t> cell;    // the coordinates as one number, the first slowest
  std::vector<int32_t> origin;  // the rank of the same instance at coordinates 0
  int64_t num_cells = 1;
};

// The grid of a mesh whose Instances() are, one after the other, the ranks `order`, `num_cells` in each.
Grid MakeGrid(const std::vector<int32_t>& order, int64_t num_cells) {
  Grid grid{std::vector<int32_t>(order.size()), std::vector<int32_t>(order.size()), num_cells};
  for (size_t place = 0; place < order.size(); ++place) {
    const size_t cell = place % num_cells;
    grid.cell[order[place]] = static_cast<int32_t>(cell);
    grid.origin[order[place]] = order[place - cell];
  }
  return grid;
}

// The grids a and b make one of both when going to the origin along one of them keeps the cell in the other, and both
// ways to the common origin end at the same rank. Going along one then keeps the other from any rank to any rank, so
// that of the ranks joined to an origin every one has its own pair of cells, and every pair has its rank.
// Returns a rank at which that fails.
std::optional<int32_t> FindMisfit(const Grid& a, const Grid& b) {
  for (size_t r = 0; r < a.cell.size(); ++r) {
    const int32_t a0 = a.origin[r], b0 = b.origin[r];
    if (a.cell[b0] != a.cell[r] || b.cell[a0] != b.cell[r] || a.origin[b0] != b.origin[a0]) return r;
  }
  return std::nullopt;
}

// REQUIRES: no misfit. So there are at most as many cells as ranks.
Grid Product(const Grid& a, const Grid& b) {
  Grid product{std::vector<int32_t>(a.cell.size()), std::vector<int32_t>(a.cell.size()), a.num_cells * b.num_cells};
  for (size_t r = 0; r < a.cell.size(); ++r) {
    product.cell[r] = static_cast<int32_t>(a.cell[r] * b.num_cells + b.cell[r]);
    product.origin[r] = b.origin[a.origin[r]];
  }
  return product;
}

// Two ranks that share an instance of `a` and one of `b`.
std::optional<std::pair<int32_t, int32_t>> MeetTwice(const Grid& a, const Grid& b) {
  std::vector<int32_t> ranks(a.cell.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto instances = [&](int32_t r) { return std::make_pair(a.origin[r], b.origin[r]); };
  absl::c_sort(ranks,
               [&](int32_t r, int32_t s) { return std::make_pair(instances(r), r) < std::make_pair(instances(s), s); });
  const auto pair = std::adjacent_find(ranks.begin(), ranks.end(),
                                       [&](int32_t r, int32_t s) { return instances(r) == instances(s); });
  if (pair == ranks.end()) return std::nullopt;
  return std::make_pair(pair[0], pair[1]);
}

// Why the grids of two parts with the dimensions `a_names` and `b_names` make none together, as `misfit` shows.
// `ranks`: by position in the root.
absl::Status NotOneGrid(const Grid& a, const Grid& b, int32_t misfit, const Names& a_names, const Names& b_names,
                        const std::vector<Rank>& ranks) {
  const std::string along_a = absl::StrJoin(a_names, ", "), along_b = absl::StrJoin(b_names, ", ");
  const std::string what = absl::StrCat("mesh: the parts with ", along_a, " and with ", along_b);
  const auto pair = [&](int32_t r, int32_t s) {
    return absl::StrCat("ranks ", ranks[r].value(), " and ", ranks[s].value());
  };
  if (const auto twice = MeetTwice(a, b); twice.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " use a dimension of the root twice: ", pair(twice->first, twice->second),
                     " meet along both; concatenate parts in which no two ranks meet more than once"));
  }
  const int32_t a0 = a.origin[misfit], b0 = b.origin[misfit];
  const std::string found =
      b.cell[a0] != b.cell[misfit]
          ? absl::StrCat(pair(a0, misfit), " meet along ", along_a, " but differ along ", along_b, " too")
      : a.cell[b0] != a.cell[misfit]
          ? absl::StrCat(pair(b0, misfit), " meet along ", along_b, " but differ along ", along_a, " too")
          : absl::StrCat(pair(a.origin[b0], b.origin[a0]), " are joined by them but have the same coordinates");
  return absl::InvalidArgumentError(absl::StrCat(
      what, " form no grid: ", found, "; concatenate parts that cross like the rows and columns of a table"));
}

// OK when the parts may stand side by side by their names, and come from one root.
absl::Status CheckParts(const std::vector<Mesh>& parts) {
  if (parts.empty()) return absl::InvalidArgumentError("mesh: nothing to concatenate; give at least one part");
  Names names;
  for (const Mesh& part : parts) {
    for (std::string& name : part.Names()) {
      if (absl::c_linear_search(names, name)) {
        return absl::InvalidArgumentError(absl::StrCat("mesh: two of the parts to concatenate have a dimension ", name,
                                                       "; flatten one of them into another name first"));
      }
      names.push_back(std::move(name));
    }
    if (names.size() > kMaxMeshDims) {
      return absl::ResourceExhaustedError(absl::StrCat("mesh: the parts to concatenate have more than ", kMaxMeshDims,
                                                       " dimensions; flatten some of them first"));
    }
  }
  return absl::OkStatus();
}

// The ranks, by position in the root, instance by instance; the instances in the order of their origins.
std::vector<int32_t> InOrder(const Grid& grid) {
  std::vector<int32_t> order(grid.cell.size()), start(grid.cell.size());
  int32_t next = 0;
  for (size_t r = 0; r < order.size(); ++r) {
    if (grid.cell[r] != 0) continue;
    start[r] = next;
    next += static_cast<int32_t>(grid.num_cells);
  }
  for (size_t r = 0; r < order.size(); ++r) order[start[grid.origin[r]] + grid.cell[r]] = static_cast<int32_t>(r);
  return order;
}

// A selection of coordinates of a mesh, the instances counted as its first dimension. Places are those of Instances(),
// one after the other.
struct Selection {
  Names names;
  std::vector<int64_t> sizes;
  std::vector<std::vector<bool>> chosen;  // by dimension and coordinate

  explicit Selection(const Mesh& mesh) : names(mesh.Names()), sizes(mesh.Sizes()) {
    names.insert(names.begin(), "instance");
    sizes.insert(sizes.begin(), mesh.NumInstances());
    for (const int64_t size : sizes) chosen.emplace_back(size, false);
  }

  std::vector<int64_t> CoordinatesOf(int64_t place) const {
    std::vector<int64_t> coordinates(sizes.size());
    for (size_t d = sizes.size(); d-- > 0; place /= sizes[d]) coordinates[d] = place % sizes[d];
    return coordinates;
  }

  void Set(int64_t place, bool value) {
    for (size_t d = sizes.size(); d-- > 0; place /= sizes[d]) chosen[d][place % sizes[d]] = value;
  }

  int64_t SizeOf(size_t dim) const { return absl::c_count(chosen[dim], true); }

  // The places at chosen coordinates, ascending.
  std::vector<int32_t> Places() const {
    std::vector<int32_t> places = {0};
    for (size_t d = 0; d < sizes.size(); ++d) {
      std::vector<int32_t> finer;
      finer.reserve(places.size() * SizeOf(d));
      for (const int32_t place : places) {
        for (int64_t c = 0; c < sizes[d]; ++c) {
          if (chosen[d][c]) finer.push_back(static_cast<int32_t>(place * sizes[d] + c));
        }
      }
      places = std::move(finer);
    }
    return places;
  }
};

// "5, 7 and 12 more".
std::string Listed(const std::vector<int64_t>& numbers) {
  const size_t shown = std::min(numbers.size(), kMaxListed);
  const size_t more = numbers.size() - shown;
  return absl::StrCat(absl::StrJoin(numbers.begin(), numbers.begin() + shown, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

// Why the survivors are no full grid: some places of the smallest selection around them are not `retained`.
absl::Status NotFullGrid(const Selection& around, const std::vector<bool>& kept,
                         absl::FunctionRef<Rank(int32_t)> rank_at) {
  Selection whole = around;  // the coordinates that lost nothing
  const std::vector<int32_t> places = around.Places();
  for (const int32_t place : places) {
    if (!kept[place]) whole.Set(place, false);
  }
  size_t best = 0;
  const auto left = [&](size_t d) { return static_cast<int64_t>(places.size()) / around.SizeOf(d) * whole.SizeOf(d); };
  for (size_t d = 1; d < around.sizes.size(); ++d) best = left(d) > left(best) ? d : best;

  const int32_t missing = *absl::c_find_if(places, [&](int32_t place) { return !kept[place]; });
  std::vector<std::string> where;
  const std::vector<int64_t> at = around.CoordinatesOf(missing);
  for (size_t d = around.sizes[0] == 1 ? 1 : 0; d < at.size(); ++d) {
    where.push_back(absl::StrCat(around.names[d], "=", at[d]));
  }
  const std::string problem = absl::StrCat("mesh: the survivors are no full grid: rank ", rank_at(missing).value(),
                                           " at (", absl::StrJoin(where, ", "), ") is missing; ");
  if (left(best) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        problem, "no coordinate of any dimension is whole, so leave out coordinates of several dimensions"));
  }
  std::vector<int64_t> coordinates, extra;
  for (int64_t c = 0; c < around.sizes[best]; ++c) {
    if (around.chosen[best][c] && !whole.chosen[best][c]) coordinates.push_back(c);
  }
  for (const int32_t place : places) {
    if (kept[place] && !whole.chosen[best][around.CoordinatesOf(place)[best]]) extra.push_back(rank_at(place).value());
  }
  return absl::InvalidArgumentError(absl::StrCat(problem, "leaving out ", around.names[best], "=", Listed(coordinates),
                                                 " too (", extra.size() == 1 ? "rank " : "ranks ", Listed(extra),
                                                 ") makes the largest full grid, of ", left(best),
                                                 left(best) == 1 ? " rank" : " ranks"));
}

}  // namespace

absl::StatusOr<Mesh> Mesh::Concatenate(const std::vector<Mesh>& parts) {
  RETURN_IF_ERROR(CheckParts(parts));
  const std::shared_ptr<const RankMap>& root = parts[0].root_;
  std::vector<MeshAxis> dims;
  std::vector<Grid> grids;
  Grid all;
  for (const Mesh& part : parts) {
    if (part.root_ != root && part.root_->ranks != root->ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: ", parts[0].DebugString(), " and ", part.DebugString(),
                       " come from meshes of other ranks, or of another order; concatenate parts of one mesh"));
    }
    grids.push_back(MakeGrid(part.RootPositions(), part.NumRanksPerInstance()));
    const Grid& grid = grids.back();
    if (&part == &parts.front()) {
      all = grid;
    } else if (!FindMisfit(all, grid).has_value()) {
      all = Product(all, grid);
    } else {  // then one of the parts does not fit this one
      size_t i = 0;
      while (!FindMisfit(grids[i], grid).has_value()) ++i;
      return NotOneGrid(grids[i], grid, *FindMisfit(grids[i], grid), parts[i].Names(), part.Names(), root->ranks);
    }
    for (MeshAxis& dim : part.Axes()) dims.push_back(std::move(dim));
  }
  const auto map = std::make_shared<const RankMap>(*root, InOrder(all));
  return RowMajor(root, map, std::move(dims));
}

absl::StatusOr<Mesh> Mesh::Restrict(const std::vector<Rank>& survivors) const {
  if (survivors.empty()) return absl::InvalidArgumentError("mesh: no rank survives; name at least one");
  const std::vector<int32_t> order = RootPositions(), place_of = Inverse(order);
  const auto rank_at = [&](int32_t place) { return root_->ranks[order[place]]; };
  std::vector<bool> kept(order.size());  // by place
  Selection around(*this);
  for (const Rank rank : survivors) {
    ASSIGN_OR_RETURN(const int32_t ordinal, OrdinalOf(rank));
    const int32_t place = place_of[root_->positions[ordinal]];
    if (kept[place]) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: rank ", rank.value(), " is twice among the survivors; name every one once"));
    }
    kept[place] = true;
    around.Set(place, true);
  }
  const std::vector<int32_t> places = around.Places();
  if (places.size() != survivors.size()) return NotFullGrid(around, kept, rank_at);
  std::vector<Rank> root, ranks;
  for (const int32_t place : place_of) {
    if (kept[place]) root.push_back(rank_at(place));
  }
  for (const int32_t place : places) ranks.push_back(rank_at(place));
  std::vector<MeshAxis> dims = Axes();
  for (size_t d = 0; d < dims.size(); ++d) dims[d].size = around.SizeOf(d + 1);
  return RowMajor(std::make_shared<const RankMap>(std::move(root)), std::make_shared<const RankMap>(std::move(ranks)),
                  std::move(dims));
}

// The mesh of `dims` whose Instances() are, one after the other, the ranks of `ranks`.
Mesh Mesh::RowMajor(std::shared_ptr<const RankMap> root, std::shared_ptr<const RankMap> ranks,
                    std::vector<MeshAxis> dims) {
  int64_t stride = 1;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    dim->stride = stride;
    stride *= dim->size;
  }
  std::vector<Axis> axes;
  const int64_t instances = static_cast<int64_t>(ranks->ranks.size()) / stride;
  if (instances > 1) axes.push_back({{"", instances, stride}, false});
  for (MeshAxis& dim : dims) axes.push_back({std::move(dim), true});
  return Mesh(std::move(root), std::move(ranks), std::move(axes));
}

}  // namespace shardmesh
