#include "core/view/placement.h"

#include <tuple>

#include "python/binding/binding.h"
#include "python/binding/pickle.h"

namespace shardmesh::python {
namespace {

// The members of a DimPlacement in their order.
using State = std::tuple<int, int, int64_t, int64_t, int64_t, int64_t, int64_t>;

State ToState(const DimPlacement& placement) {
  return {static_cast<int>(placement.kind),
          placement.dim,
          placement.split_factor,
          placement.owner,
          placement.granule,
          placement.space_elements,
          placement.first_element};
}

// A value that no placement has is refused where the placement is used.
DimPlacement FromState(const State& state) {
  const auto& [kind, dim, split_factor, owner, granule, space_elements, first_element] = state;
  return {static_cast<DimPlacement::Kind>(kind), dim, split_factor, owner, granule, space_elements, first_element};
}

}  // namespace

void BindPlacement(py::module_& module) {
  py::class_<DimPlacement> type(module, "Placement", "What one dimension of a mesh does to a tensor. Immutable.");
  DefinePickle(module, type, "placement", &ToState, &FromState);
  type.def(
      "__eq__", [](const DimPlacement& a, const DimPlacement& b) { return ToState(a) == ToState(b); },
      py::is_operator());
  type.def("__hash__", [](const DimPlacement& placement) { return py::hash(py::cast(ToState(placement))); });
  type.def("__repr__", &DimPlacement::ToString);
  module.def("Replicate", &DimPlacement::Replicate, "Every rank along the dimension holds the same.");
  module.def(
      "Shard", [](Integer dim) { return DimPlacement::Shard(DimOf(dim)); }, py::arg("dim"),
      "torch.chunk along a tensor dimension: the last ranks are short or empty.");
  module.def(
      "StridedShard",
      [](Integer dim, Integer split_factor) { return DimPlacement::StridedShard(DimOf(dim), split_factor.value); },
      py::arg("dim"), py::arg("split_factor"),
      "As Shard, but dimensions of the mesh further right, whose sizes multiply to split_factor, shard first.");
  module.def(
      "Owned", [](Integer coordinate) { return DimPlacement::Owned(coordinate.value); }, py::arg("coordinate"),
      "The whole at one coordinate, nothing elsewhere.");
  module.def(
      "Flat", [](Integer granule) { return DimPlacement::Flat(granule.value); }, py::arg("granule"),
      "Row-major elements, cut into equal shards of whole granules.");
  module.def(
      "place_along",
      [](const Mesh& mesh, std::vector<std::pair<Text, DimPlacement>> texts) {
        std::vector<std::pair<std::string, DimPlacement>> named;
        for (auto& [name, placement] : texts) named.emplace_back(std::move(name.value), placement);
        return OrThrow(PlaceAlong(mesh, named));
      },
      py::arg("mesh"), py::arg("named"));
}

}  // namespace shardmesh::python
