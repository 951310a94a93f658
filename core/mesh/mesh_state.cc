// A mesh as plain values, and back (core/mesh/mesh.h).
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/mesh/mesh.h"
#include "core/mesh/mesh_rank_map.h"

namespace shardmesh {
namespace {

// Whether sizes and strides run over the positions [0, count) once each: from the fastest axis on, every stride is the
// number of positions that the faster ones run over.
bool RunOverAll(const std::vector<Mesh::Axis>& axes, int64_t count) {
  std::vector<MeshAxis> by_stride;
  for (const Mesh::Axis& axis : axes) {
    if (axis.layout.size < 1 || axis.layout.stride < 1 || axis.layout.stride > count) return false;
    if (axis.layout.size > 1) by_stride.push_back(axis.layout);
  }
  absl::c_sort(by_stride, [](const MeshAxis& a, const MeshAxis& b) { return a.stride < b.stride; });
  int64_t positions = 1;
  for (const MeshAxis& axis : by_stride) {
    if (axis.stride != positions || axis.size > count / positions) return false;
    positions *= axis.size;
  }
  return positions == count;
}

}  // namespace

Mesh::State Mesh::ToState() const { return {root_->ranks, ranks_->ranks, axes_}; }

absl::StatusOr<Mesh> Mesh::FromState(State state) {
  MeshSpec visible;
  for (const Axis& axis : state.axes) {
    if (axis.visible) visible.dims.push_back({axis.layout.name, axis.layout.size, DefaultDimRole(axis.layout.name)});
  }
  RETURN_IF_ERROR(visible.Validate());
  const auto count = static_cast<int64_t>(state.ranks.size());
  if (count > kMaxMeshRanks) {
    return absl::ResourceExhaustedError(absl::StrCat("mesh: ", count, " ranks; at most ", kMaxMeshRanks));
  }
  if (!RunOverAll(state.axes, count)) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: the axes of a state do not run over its ", count, " ranks once; give what ToState gave"));
  }
  const bool is_root = state.root == state.ranks;
  const auto ranks = std::make_shared<const RankMap>(std::move(state.ranks));
  RETURN_IF_ERROR(ranks->Check());
  const auto root = is_root ? ranks : std::make_shared<const RankMap>(std::move(state.root));
  if (root->sorted != ranks->sorted) {
    return absl::InvalidArgumentError("mesh: the ranks of a state are not those of its root; give what ToState gave");
  }
  return Mesh(root, ranks, std::move(state.axes));
}

}  // namespace shardmesh
