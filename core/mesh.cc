#include "core/mesh.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"

namespace shardmesh {

// Which rank stands at which position, and back.
struct Mesh::RankMap {
  std::vector<Rank> ranks;         // by position
  std::vector<int32_t> positions;  // every position, ordered by the rank that stands there

  explicit RankMap(std::vector<Rank> by_position) : ranks(std::move(by_position)), positions(ranks.size()) {
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
    if (absl::c_is_sorted(ranks)) return;
    absl::c_sort(positions, [this](int32_t a, int32_t b) { return ranks[a] < ranks[b]; });
  }
};

namespace {

constexpr size_t kMaxQuotedBytes = 80;

std::string Quoted(absl::string_view value) {
  const bool cut = value.size() > kMaxQuotedBytes;
  return absl::StrCat("\"", absl::CHexEscape(value.substr(0, kMaxQuotedBytes)), cut ? "...\"" : "\"");
}

absl::Status CheckSameNumber(absl::string_view what, size_t num_sizes, size_t num_names) {
  if (num_sizes == num_names) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("mesh: ", what, " has ", num_sizes, " sizes but ", num_names,
                                                 " names; give one name for each size"));
}

// The validated specification of a shape; roles do not matter to the algebra.
absl::StatusOr<MeshSpec> ToSpec(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  RETURN_IF_ERROR(CheckSameNumber("the shape", shape.size(), names.size()));
  MeshSpec spec;
  for (size_t d = 0; d < shape.size(); ++d) spec.dims.push_back({names[d], shape[d], DefaultDimRole(names[d])});
  RETURN_IF_ERROR(spec.Validate());
  return spec;
}

absl::Status CheckRanks(const std::vector<Rank>& ranks, int64_t num_positions) {
  if (static_cast<int64_t>(ranks.size()) != num_positions) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: ", ranks.size(), " ranks are given for a shape of ",
                                                   num_positions, "; give exactly one rank for each position"));
  }
  std::vector<Rank> sorted = ranks;
  absl::c_sort(sorted);
  if (sorted.front() < Rank(0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: rank ", sorted.front().value(), " is negative; ranks count from 0"));
  }
  const auto twice = absl::c_adjacent_find(sorted);
  if (twice != sorted.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: rank ", twice->value(), " is given twice; every rank has one position"));
  }
  return absl::OkStatus();
}

}  // namespace

Mesh::Mesh(std::shared_ptr<const RankMap> ranks, std::vector<Axis> axes)
    : ranks_(std::move(ranks)), axes_(std::move(axes)) {}

absl::StatusOr<Mesh> Mesh::Create(const MeshSpec& spec) {
  RETURN_IF_ERROR(spec.Validate());
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (const MeshDim& dim : spec.dims) {
    shape.push_back(dim.size);
    names.push_back(dim.name);
  }
  return Create(shape, names);
}

absl::StatusOr<Mesh> Mesh::Create(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  ASSIGN_OR_RETURN(const MeshSpec spec, ToSpec(shape, names));
  std::vector<Rank> ranks;
  for (int32_t r = 0; r < spec.NumRanks(); ++r) ranks.push_back(Rank(r));
  return Create(shape, names, std::move(ranks));
}

absl::StatusOr<Mesh> Mesh::Create(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                                  std::vector<Rank> ranks) {
  ASSIGN_OR_RETURN(const MeshSpec spec, ToSpec(shape, names));
  RETURN_IF_ERROR(CheckRanks(ranks, spec.NumRanks()));
  std::vector<Axis> axes;
  int64_t stride = spec.NumRanks();
  for (const MeshDim& dim : spec.dims) {
    stride /= dim.size;
    axes.push_back({{dim.name, dim.size, stride}, true});
  }
  return Mesh(std::make_shared<const RankMap>(std::move(ranks)), std::move(axes));
}

absl::StatusOr<size_t> Mesh::Find(absl::string_view name) const {
  for (size_t a = 0; a < axes_.size(); ++a) {
    if (axes_[a].visible && axes_[a].layout.name == name) return a;
  }
  return absl::NotFoundError(
      absl::StrCat("mesh: no dimension is named ", Quoted(name), "; this mesh has ", absl::StrJoin(Names(), ", ")));
}

absl::StatusOr<std::vector<size_t>> Mesh::Find(const std::vector<std::string>& names) const {
  if (names.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: no dimension is named; name at least one of ", absl::StrJoin(Names(), ", ")));
  }
  std::vector<size_t> found;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const size_t axis, Find(name));
    if (absl::c_linear_search(found, axis)) {
      return absl::InvalidArgumentError(absl::StrCat("mesh: dimension ", name, " is named twice; name it once"));
    }
    found.push_back(axis);
  }
  return found;
}

absl::StatusOr<Mesh> Mesh::Slice(const std::vector<std::string>& names) const {
  ASSIGN_OR_RETURN(const std::vector<size_t> kept, Find(names));
  std::vector<Axis> axes;
  for (size_t a = 0; a < axes_.size(); ++a) {
    const bool visible = absl::c_linear_search(kept, a);
    if (!visible && axes_[a].layout.size == 1) continue;  // one choice is no choice: nothing to remember
    axes.push_back({axes_[a].layout, visible});
  }
  return Mesh(ranks_, std::move(axes));
}

absl::StatusOr<Mesh> Mesh::Transpose(const std::vector<std::string>& names) const {
  ASSIGN_OR_RETURN(const std::vector<size_t> order, Find(names));
  if (order.size() != Names().size()) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: the new order ", absl::StrJoin(names, ", "), " names ",
                                                   order.size(), " of the dimensions ", absl::StrJoin(Names(), ", "),
                                                   "; name every one of them once"));
  }
  std::vector<Axis> axes = axes_;
  size_t next = 0;
  for (Axis& axis : axes) {
    if (axis.visible) axis = axes_[order[next++]];
  }
  return Mesh(ranks_, std::move(axes));
}

// The same mesh with the axes `last`, in this order, as the fastest of the rank map: one stride then describes them.
Mesh Mesh::Relabelled(const std::vector<size_t>& last) const {
  std::vector<size_t> order;
  for (size_t a = 0; a < axes_.size(); ++a) {
    if (!absl::c_linear_search(last, a)) order.push_back(a);
  }
  order.insert(order.end(), last.begin(), last.end());
  Order old_axes;
  for (const size_t a : order) old_axes.push_back(&axes_[a]);
  std::vector<Axis> axes = axes_;
  int64_t stride = NumRanks();
  for (const size_t a : order) {
    stride /= axes[a].layout.size;
    axes[a].layout.stride = stride;
  }
  return Mesh(std::make_shared<const RankMap>(Enumerate(old_axes)), std::move(axes));
}

absl::StatusOr<Mesh> Mesh::Flatten(const std::vector<std::string>& names, absl::string_view into) const {
  ASSIGN_OR_RETURN(const std::vector<size_t> parts, Find(names));
  RETURN_IF_ERROR(ValidateDimName(into));
  const auto other = Find(into);
  if (other.ok() && !absl::c_linear_search(parts, *other)) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: flattening ", absl::StrJoin(names, ", "), " into ", into, ", but ", into,
                     " is another dimension of this mesh; choose a name that is not taken"));
  }
  MeshAxis flat{std::string(into), 1, 1};
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {  // fastest first
    const MeshAxis& axis = axes_[*part].layout;
    if (axis.size == 1) continue;
    if (flat.size == 1) flat.stride = axis.stride;
    if (axis.stride != flat.stride * flat.size) return Relabelled(parts).Flatten(names, into);
    flat.size *= axis.size;
  }
  const size_t place = *absl::c_min_element(parts);
  std::vector<Axis> axes;
  for (size_t a = 0; a < axes_.size(); ++a) {
    if (a == place) axes.push_back({flat, true});
    if (!absl::c_linear_search(parts, a)) axes.push_back(axes_[a]);
  }
  return Mesh(ranks_, std::move(axes));
}

absl::StatusOr<Mesh> Mesh::Unflatten(absl::string_view name, const std::vector<int64_t>& sizes,
                                     const std::vector<std::string>& names) const {
  ASSIGN_OR_RETURN(const size_t place, Find(name));
  const MeshAxis& whole = axes_[place].layout;
  const std::string what = absl::StrCat("unflattening ", whole.name, "=", whole.size);
  RETURN_IF_ERROR(CheckSameNumber(what, sizes.size(), names.size()));
  const absl::StatusOr<MeshSpec> parts = ToSpec(sizes, names);
  if (!parts.ok()) return absl::Status(parts.status().code(), absl::StrCat(what, ": ", parts.status().message()));
  if (parts->NumRanks() != whole.size) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: ", what, ": the sizes ", absl::StrJoin(sizes, " x "),
                                                   " make ", parts->NumRanks(), "; their product must be ",
                                                   whole.size));
  }
  if (Names().size() - 1 + names.size() > kMaxMeshDims) {
    return absl::ResourceExhaustedError(absl::StrCat("mesh: ", what, " into ", names.size(), " dimensions makes ",
                                                     Names().size() - 1 + names.size(), " in all; at most ",
                                                     kMaxMeshDims, " are supported"));
  }
  std::vector<Axis> axes(axes_.begin(), axes_.begin() + place);
  int64_t stride = whole.stride * whole.size;
  for (const MeshDim& part : parts->dims) {
    const auto other = Find(part.name);
    if (other.ok() && *other != place) {
      return absl::InvalidArgumentError(absl::StrCat("mesh: ", what, " into ", part.name, ", which is another ",
                                                     "dimension of this mesh; choose a name that is not taken"));
    }
    stride /= part.size;
    axes.push_back({{part.name, part.size, stride}, true});
  }
  axes.insert(axes.end(), axes_.begin() + place + 1, axes_.end());
  return Mesh(ranks_, std::move(axes));
}

std::vector<MeshAxis> Mesh::Axes() const {
  std::vector<MeshAxis> axes;
  for (const Axis* axis : Pick(true)) axes.push_back(axis->layout);
  return axes;
}

std::vector<int64_t> Mesh::Sizes() const {
  std::vector<int64_t> sizes;
  for (const Axis* axis : Pick(true)) sizes.push_back(axis->layout.size);
  return sizes;
}

std::vector<std::string> Mesh::Names() const {
  std::vector<std::string> names;
  for (const Axis* axis : Pick(true)) names.push_back(axis->layout.name);
  return names;
}

absl::StatusOr<int64_t> Mesh::SizeOf(absl::string_view name) const {
  ASSIGN_OR_RETURN(const size_t axis, Find(name));
  return axes_[axis].layout.size;
}

int64_t Mesh::NumRanks() const { return static_cast<int64_t>(ranks_->ranks.size()); }

int64_t Mesh::NumInstances() const { return NumRanks() / NumRanksPerInstance(); }

int64_t Mesh::NumRanksPerInstance() const {
  int64_t ranks = 1;
  for (const Axis* axis : Pick(true)) ranks *= axis->layout.size;
  return ranks;
}

Mesh::Order Mesh::Pick(bool visible) const {
  Order order;
  for (const Axis& axis : axes_) {
    if (axis.visible == visible) order.push_back(&axis);
  }
  return order;
}

// The ranks at all coordinates along `order`, its first axis slowest, with the coordinates of other axes 0.
std::vector<Rank> Mesh::Enumerate(const Order& order) const {
  std::vector<int64_t> positions = {0};
  for (const Axis* axis : order) {
    std::vector<int64_t> finer;
    finer.reserve(positions.size() * axis->layout.size);
    for (const int64_t start : positions) {
      for (int64_t i = 0; i < axis->layout.size; ++i) finer.push_back(start + i * axis->layout.stride);
    }
    positions = std::move(finer);
  }
  std::vector<Rank> ranks;
  ranks.reserve(positions.size());
  for (const int64_t position : positions) ranks.push_back(ranks_->ranks[position]);
  return ranks;
}

std::vector<std::vector<Rank>> Mesh::Chunks(const Order& order, int64_t chunk) const {
  const std::vector<Rank> all = Enumerate(order);
  std::vector<std::vector<Rank>> chunks;
  for (auto at = all.begin(); at != all.end(); at += chunk) chunks.emplace_back(at, at + chunk);
  return chunks;
}

std::vector<std::vector<Rank>> Mesh::Instances() const {
  Order order = Pick(false);
  for (const Axis* axis : Pick(true)) order.push_back(axis);
  return Chunks(order, NumRanksPerInstance());
}

absl::StatusOr<std::vector<std::vector<Rank>>> Mesh::Groups(absl::string_view name) const {
  ASSIGN_OR_RETURN(const size_t along, Find(name));
  Order order = Pick(false);
  for (const Axis* axis : Pick(true)) {
    if (axis != &axes_[along]) order.push_back(axis);
  }
  order.push_back(&axes_[along]);
  return Chunks(order, axes_[along].layout.size);
}

absl::StatusOr<int64_t> Mesh::PositionOf(Rank rank) const {
  const auto& positions = ranks_->positions;
  const auto at = std::lower_bound(positions.begin(), positions.end(), rank,
                                   [this](int32_t position, Rank r) { return ranks_->ranks[position] < r; });
  if (at == positions.end() || ranks_->ranks[*at] != rank) {
    return absl::NotFoundError(absl::StrCat("mesh: rank ", rank.value(), " is not in ", DebugString(),
                                            "; its ranks lie from ", ranks_->ranks[positions.front()].value(), " to ",
                                            ranks_->ranks[positions.back()].value()));
  }
  return *at;
}

// A position has coordinate (position / stride) mod size along every axis: the strides are a mixed-radix system.
absl::StatusOr<std::vector<int64_t>> Mesh::CoordinatesOf(Rank rank) const {
  ASSIGN_OR_RETURN(const int64_t position, PositionOf(rank));
  std::vector<int64_t> coordinates;
  for (const Axis* axis : Pick(true)) coordinates.push_back(position / axis->layout.stride % axis->layout.size);
  return coordinates;
}

absl::StatusOr<int64_t> Mesh::InstanceOf(Rank rank) const {
  ASSIGN_OR_RETURN(const int64_t position, PositionOf(rank));
  int64_t instance = 0;
  for (const Axis* axis : Pick(false)) {
    instance = instance * axis->layout.size + position / axis->layout.stride % axis->layout.size;
  }
  return instance;
}

absl::StatusOr<std::vector<Rank>> Mesh::GroupOf(Rank rank, absl::string_view name) const {
  ASSIGN_OR_RETURN(const size_t along, Find(name));
  ASSIGN_OR_RETURN(const int64_t position, PositionOf(rank));
  const MeshAxis& axis = axes_[along].layout;
  const int64_t first = position - position / axis.stride % axis.size * axis.stride;
  std::vector<Rank> group;
  for (int64_t i = 0; i < axis.size; ++i) group.push_back(ranks_->ranks[first + i * axis.stride]);
  return group;
}

absl::StatusOr<Rank> Mesh::RankAt(const std::vector<int64_t>& coordinates, int64_t instance) const {
  const Order dims = Pick(true);
  if (coordinates.size() != dims.size()) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: ", coordinates.size(),
                                                   " coordinates are given; give one for ", "each of the dimensions ",
                                                   absl::StrJoin(Names(), ", ")));
  }
  if (instance < 0 || instance >= NumInstances()) {
    return absl::OutOfRangeError(
        absl::StrCat("mesh: there is no instance ", instance, "; they count from 0 to ", NumInstances() - 1));
  }
  int64_t position = 0;
  for (size_t d = 0; d < dims.size(); ++d) {
    const MeshAxis& axis = dims[d]->layout;
    if (coordinates[d] < 0 || coordinates[d] >= axis.size) {
      return absl::OutOfRangeError(absl::StrCat("mesh: there is no coordinate ", coordinates[d], " along ", axis.name,
                                                "; they count from 0 to ", axis.size - 1));
    }
    position += coordinates[d] * axis.stride;
  }
  const Order hidden = Pick(false);
  for (auto axis = hidden.rbegin(); axis != hidden.rend(); ++axis) {
    position += instance % (*axis)->layout.size * (*axis)->layout.stride;
    instance /= (*axis)->layout.size;
  }
  return ranks_->ranks[position];
}

std::string Mesh::DebugString() const {
  const std::string dims = absl::StrJoin(Pick(true), ", ", [](std::string* out, const Axis* axis) {
    absl::StrAppend(out, axis->layout.name, "=", axis->layout.size, " stride ", axis->layout.stride);
  });
  return absl::StrCat("mesh(", dims, ") ", NumInstances(), NumInstances() == 1 ? " instance" : " instances", " of ",
                      NumRanksPerInstance(), NumRanksPerInstance() == 1 ? " rank" : " ranks");
}

}  // namespace shardmesh
