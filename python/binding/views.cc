#include <tuple>

#include "core/base/status.h"
#include "core/layout/stored_view.h"
#include "core/view/reshard.h"
#include "core/view/view.h"
#include "python/binding/binding.h"

namespace shardmesh::python {
namespace {

using Integers = std::vector<Integer>;
using Placements = std::vector<DimPlacement>;

using PairOfBox = std::pair<Integers, Integers>;               // (offsets, sizes)
using TripleOfBox = std::tuple<PairOfBox, Integer, Integers>;  // (box, offset, strides)

Dims ToDims(const Integers& numbers) {
  Dims dims;
  for (const Integer& number : numbers) dims.push_back(number.value);
  return dims;
}

Box ToBox(const PairOfBox& box) { return {ToDims(box.first), ToDims(box.second)}; }

TensorView Placed(const Integers& shape, const Mesh& mesh, const Placements& placements) {
  return OrThrow(TensorView::Placed(ToDims(shape), mesh, placements));
}

TensorView Part(const Integers& shape, const PairOfBox& box, const Mesh& mesh, const Placements& placements) {
  return OrThrow(TensorView::Part(ToDims(shape), ToBox(box), mesh, placements));
}

// A part is (name, box, placements).
TensorView Packed(const Integers& shape, std::vector<std::tuple<Text, PairOfBox, Placements>> parts, Integer join_dim,
                  const Mesh& mesh, bool gaps) {
  std::vector<NamedBox> boxes;
  std::vector<Placements> placements;
  for (auto& [name, box, placed] : parts) {
    boxes.push_back({std::move(name.value), ToBox(box)});
    placements.push_back(std::move(placed));
  }
  const PackedParts packed =
      OrThrow(PackedParts::Create(ToDims(shape), std::move(boxes), gaps ? Gaps::kAllow : Gaps::kRefuse));
  return OrThrow(TensorView::Packed(packed, DimOf(join_dim), mesh, placements));
}

TensorView Listed(const Integers& shape, const std::vector<std::pair<Rank, std::vector<TripleOfBox>>>& by_rank) {
  std::vector<RankBox> boxes;
  std::vector<Rank> boxless;
  for (const auto& [rank, locals] : by_rank) {
    for (const auto& [box, offset, strides] : locals) {
      boxes.push_back({rank, {ToBox(box), offset.value, ToDims(strides)}});
    }
    if (locals.empty()) boxless.push_back(rank);
  }
  return OrThrow(TensorView::Listed(ToDims(shape), std::move(boxes), std::move(boxless)));
}

py::list BoxesAt(const TensorView& view, Rank rank) {
  py::list boxes;
  for (const LocalBox& local : OrThrow(view.BoxesOf(rank))) {
    boxes.append(py::make_tuple(py::make_tuple(ToTuple(local.box.offsets), ToTuple(local.box.sizes)), local.offset,
                                ToTuple(local.strides)));
  }
  return boxes;
}

// For each tensor its copies as (source, source_offset, destination_offset, num_elements).
std::vector<py::list> Copies(const std::vector<TensorView>& source, const std::vector<TensorView>& destination,
                             std::vector<Text> names, Rank rank, Integer max_copies) {
  if (max_copies.value < 0 || max_copies.value > kDefaultMaxCopies) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("reshard: max_copies is ", max_copies.value, "; give 0 to ", kDefaultMaxCopies)));
  }
  const ReshardPlan plan =
      OrThrow(PlanReshard(source, destination, rank, max_copies.value, ToVector(std::move(names))));
  std::vector<py::list> by_tensor(destination.size());
  for (const Copy& copy : plan.copies) {
    by_tensor[copy.tensor].append(
        py::make_tuple(copy.source, copy.source_offset, copy.destination_offset, copy.num_elements));
  }
  return by_tensor;
}

}  // namespace

void BindViews(py::module_& module) {
  py::class_<TensorView>(module, "View")
      .def_property_readonly("shape", [](const TensorView& view) { return ToTuple(view.shape()); })
      .def("boxes", &BoxesAt, py::arg("rank"));
  module.def("placed", &Placed, py::arg("shape"), py::arg("mesh"), py::arg("placements"));
  module.def("part", &Part, py::arg("shape"), py::arg("box"), py::arg("mesh"), py::arg("placements"));
  module.def("packed", &Packed, py::arg("shape"), py::arg("parts"), py::arg("join_dim"), py::arg("mesh"),
             py::arg("gaps"));
  module.def("listed", &Listed, py::arg("shape"), py::arg("boxes"));
  module.def(
      "view_of", [](const StoredPlan& plan, const Text& name) { return OrThrow(ViewOf(plan, name.value)); },
      py::arg("plan"), py::arg("name"));
  module.def("reshard", &Copies, py::arg("source"), py::arg("destination"), py::arg("names"), py::arg("rank"),
             py::arg("max_copies"));
}

}  // namespace shardmesh::python
