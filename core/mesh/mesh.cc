#include "core/mesh/mesh.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/mesh/mesh_rank_map.h"

namespace shardmesh {

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

}  // namespace

Mesh::Mesh(std::shared_ptr<const RankMap> root, std::shared_ptr<const RankMap> ranks, std::vector<Axis> axes)
    : root_(std::move(root)), ranks_(std::move(ranks)), axes_(std::move(axes)) {}

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
  ranks.reserve(spec.NumRanks());
  for (int32_t r = 0; r < spec.NumRanks(); ++r) ranks.push_back(Rank(r));
  return Create(shape, names, std::move(ranks));
}

absl::StatusOr<Mesh> Mesh::Create(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                                  std::vector<Rank> ranks) {
  ASSIGN_OR_RETURN(const MeshSpec spec, ToSpec(shape, names));
  if (static_cast<int64_t>(ranks.size()) != spec.NumRanks()) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: ", ranks.size(), " ranks are given for a shape of ",
                                                   spec.NumRanks(), "; give exactly one rank for each position"));
  }
  const auto map = std::make_shared<const RankMap>(std::move(ranks));
  RETURN_IF_ERROR(map->Check());
  std::vector<Axis> axes;
  int64_t stride = spec.NumRanks();
  for (const MeshDim& dim : spec.dims) {
    stride /= dim.size;
    axes.push_back({{dim.name, dim.size, stride}, true});
  }
  return Mesh(map, map, std::move(axes));
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
  size_t next = 0;
  for (size_t a = 0; a < axes_.size(); ++a) {
    if (absl::c_linear_search(kept, a)) {
      axes.push_back(axes_[kept[next++]]);
    } else if (axes_[a].layout.size > 1) {  // one choice is no choice: nothing to remember
      axes.push_back({axes_[a].layout, false});
    }
  }
  return With(std::move(axes));
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
  return With(std::move(axes));
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
  return Mesh(root_, std::make_shared<const RankMap>(*ranks_, Positions(old_axes)), std::move(axes));
}

absl::StatusOr<Mesh> Mesh::Flatten(const std::vector<std::string>& names, absl::string_view into,
                                   bool keep_rest) const {
  ASSIGN_OR_RETURN(const std::vector<size_t> parts, Find(names));
  if (!keep_rest && parts.size() < Names().size()) return Slice(names)->Flatten(names, into);
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
  return With(std::move(axes));
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
  return With(std::move(axes));
}

}  // namespace shardmesh
