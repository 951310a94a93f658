// What a mesh answers (core/mesh/mesh.h): its dimensions, instances, groups and coordinates.
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/mesh/mesh.h"
#include "core/mesh/mesh_rank_map.h"

namespace shardmesh {

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
  for (const Axis& axis : axes_) ranks *= axis.visible ? axis.layout.size : 1;
  return ranks;
}

Mesh::Order Mesh::Pick(bool visible) const {
  Order order;
  order.reserve(axes_.size());
  for (const Axis& axis : axes_) {
    if (axis.visible == visible) order.push_back(&axis);
  }
  return order;
}

// All hidden coordinates, then all visible ones: the ranks of Instances(), one after the other.
Mesh::Order Mesh::InstanceMajor() const {
  Order order = Pick(false);
  for (const Axis* axis : Pick(true)) order.push_back(axis);
  return order;
}

// The positions at all coordinates along `order`, its first axis slowest, with the coordinates of other axes 0.
std::vector<int32_t> Mesh::Positions(const Order& order) const {
  std::vector<int32_t> positions = {0};
  for (const Axis* axis : order) {
    std::vector<int32_t> finer;
    finer.reserve(positions.size() * axis->layout.size);
    for (const int32_t start : positions) {
      for (int64_t i = 0; i < axis->layout.size; ++i) {
        finer.push_back(start + static_cast<int32_t>(i * axis->layout.stride));
      }
    }
    positions = std::move(finer);
  }
  return positions;
}

// The positions in the root of the ranks of Instances(), one after the other.
std::vector<int32_t> Mesh::RootPositions() const {
  std::vector<int32_t> positions = Positions(InstanceMajor());
  if (root_ == ranks_) return positions;
  std::vector<int32_t> in_root(positions.size());  // by position in ranks_
  for (size_t k = 0; k < in_root.size(); ++k) in_root[ranks_->positions[k]] = root_->positions[k];
  for (int32_t& position : positions) position = in_root[position];
  return positions;
}

std::vector<std::vector<Rank>> Mesh::Chunks(const Order& order, int64_t chunk) const {
  const std::vector<int32_t> positions = Positions(order);
  std::vector<std::vector<Rank>> chunks(positions.size() / chunk);
  auto at = positions.begin();
  for (std::vector<Rank>& ranks : chunks) {
    ranks.reserve(chunk);
    for (int64_t i = 0; i < chunk; ++i) ranks.push_back(ranks_->ranks[*at++]);
  }
  return chunks;
}

std::vector<std::vector<Rank>> Mesh::Instances() const { return Chunks(InstanceMajor(), NumRanksPerInstance()); }

std::vector<std::vector<Rank>> Mesh::GroupsAlong(const std::vector<size_t>& along) const {
  Order order = Pick(false);
  for (const Axis* axis : Pick(true)) {
    if (!absl::c_linear_search(along, static_cast<size_t>(axis - axes_.data()))) order.push_back(axis);
  }
  int64_t size = 1;
  for (const size_t a : along) {
    order.push_back(&axes_[a]);
    size *= axes_[a].layout.size;
  }
  return Chunks(order, size);
}

absl::StatusOr<std::vector<std::vector<Rank>>> Mesh::Groups(const std::vector<std::string>& names) const {
  ASSIGN_OR_RETURN(const std::vector<size_t> along, Find(names));
  return GroupsAlong(along);
}

absl::StatusOr<int32_t> Mesh::OrdinalOf(Rank rank) const {
  if (const auto ordinal = ranks_->OrdinalOf(rank); ordinal.has_value()) return *ordinal;
  return absl::NotFoundError(absl::StrCat("mesh: rank ", rank.value(), " is not in ", DebugString(),
                                          "; its ranks lie from ", ranks_->sorted.front().value(), " to ",
                                          ranks_->sorted.back().value()));
}

absl::StatusOr<int64_t> Mesh::PositionOf(Rank rank) const {
  ASSIGN_OR_RETURN(const int32_t ordinal, OrdinalOf(rank));
  return ranks_->positions[ordinal];
}

// A position has coordinate (position / stride) mod size along every axis: the strides are a mixed-radix system.
absl::StatusOr<std::vector<int64_t>> Mesh::CoordinatesOf(Rank rank) const {
  ASSIGN_OR_RETURN(const int64_t position, PositionOf(rank));
  std::vector<int64_t> coordinates;
  coordinates.reserve(axes_.size());
  for (const Axis& axis : axes_) {
    if (axis.visible) coordinates.push_back(position / axis.layout.stride % axis.layout.size);
  }
  return coordinates;
}

absl::StatusOr<int64_t> Mesh::InstanceOf(Rank rank) const {
  ASSIGN_OR_RETURN(const int64_t position, PositionOf(rank));
  int64_t instance = 0;
  for (const Axis& axis : axes_) {
    if (axis.visible) continue;
    instance = instance * axis.layout.size + position / axis.layout.stride % axis.layout.size;
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
