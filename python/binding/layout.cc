#include <optional>
#include <tuple>

#include "core/base/status.h"
#include "core/layout/layout_boxes.h"
#include "core/layout/layout_picture.h"
#include "core/layout/layout_reshard.h"
#include "python/binding/binding.h"
#include "python/binding/pickle.h"

namespace shardmesh::python {
namespace {

LayoutTensor CreateTensor(Text name, const std::vector<Integer>& shape, Text format, const Text& granule,
                          Text tied_to) {
  absl::StatusOr<Granule> parsed = ParseGranule(granule.value);
  if (!parsed.ok()) throw StatusError(Annotate(parsed.status(), absl::StrCat("parameter \"", name.value, "\"")));
  if (format.value.empty()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("parameter \"", name.value, "\": its format is empty; give a text, such as fp32")));
  }
  return {std::move(name.value), ToVector(shape), std::move(format.value), *parsed, std::move(tied_to.value)};
}

StoredPlan CreatePlan(const Mesh& mesh, std::vector<Text> replicate, std::vector<LayoutTensor> tensors,
                      std::optional<Integer> bucket_elements, std::optional<double> max_padding,
                      std::optional<double> max_coarse_padding) {
  LayoutOptions options;
  if (bucket_elements.has_value()) options.bucket_elements = bucket_elements->value;
  options.max_padding = max_padding.value_or(options.max_padding);
  options.max_coarse_padding = max_coarse_padding.value_or(options.max_coarse_padding);
  return OrThrow(StoredPlan::Create(std::move(tensors), options, mesh, ToVector(std::move(replicate))));
}

// The arguments of StoredPlan::Create, a tensor as (name, shape, space, granule, tied_to), the options in their order.
using TensorState = std::tuple<std::string, std::vector<int64_t>, std::string, std::string, std::string>;
using PlanState = std::tuple<std::vector<TensorState>, int64_t, double, double, Mesh, std::vector<std::string>>;

PlanState ToState(const StoredPlan& plan) {
  std::vector<TensorState> tensors;
  for (const LayoutTensor& tensor : plan.layout().tensors()) {
    tensors.emplace_back(tensor.name, tensor.shape, tensor.space, tensor.granule.ToString(), tensor.tied_to);
  }
  const LayoutOptions& options = plan.layout().options();
  return {std::move(tensors), options.bucket_elements, options.max_padding, options.max_coarse_padding,
          plan.mesh(),        plan.replicate()};
}

StoredPlan FromState(const PlanState& state) {
  const auto& [tensor_states, bucket_elements, max_padding, max_coarse_padding, mesh, replicate] = state;
  std::vector<LayoutTensor> tensors;
  for (const auto& [name, shape, space, granule, tied_to] : tensor_states) {
    tensors.push_back({name, shape, space, OrThrow(ParseGranule(granule)), tied_to});
  }
  const LayoutOptions options = {1, bucket_elements, max_padding, max_coarse_padding};
  return OrThrow(StoredPlan::Create(std::move(tensors), options, mesh, replicate));
}

py::list Buckets(const StoredPlan& plan) {
  py::list buckets;
  for (const LayoutBucket& bucket : plan.layout().buckets()) {
    py::list names;
    for (const int32_t tensor : bucket.tensors) names.append(plan.layout().tensors()[tensor].name);
    buckets.append(py::make_tuple(bucket.space, std::string(GranuleKindName(bucket.kind)), bucket.granule_elements,
                                  bucket.owned, bucket.num_elements, bucket.shard_elements, bucket.padding,
                                  py::tuple(names)));
  }
  return buckets;
}

py::dict Padding(const StoredPlan& plan) {
  py::dict padding;
  for (const KindPadding& kind : plan.layout().PaddingByKind()) {
    padding[py::str(std::string(GranuleKindName(kind.kind)))] =
        py::make_tuple(kind.num_buckets, kind.num_elements, kind.padding);
  }
  return padding;
}

py::dict Shapes(const StoredPlan& plan) {
  py::dict shapes;
  for (const LayoutTensor& tensor : plan.layout().tensors()) shapes[py::str(tensor.name)] = ToTuple(tensor.shape);
  return shapes;
}

py::tuple PlaceOf(const StoredPlan& plan, const Text& name) {
  const TensorPlace& place = plan.layout().places()[OrThrow(plan.layout().IndexOf(name.value))];
  return py::make_tuple(place.bucket, place.offset, place.num_elements, place.padded_elements, place.owner);
}

py::list PartsOf(const StoredPlan& plan, const Text& name) {
  py::list parts;
  for (const StoredPart& part : OrThrow(plan.PartsOf(name.value))) {
    parts.append(py::make_tuple(part.shard, ToTuple(plan.RanksOf(part.shard)), part.stretch.first_element,
                                part.stretch.shard_offset, part.stretch.num_elements));
  }
  return parts;
}

py::tuple ToPair(const Box& box) { return py::make_tuple(ToTuple(box.offsets), ToTuple(box.sizes)); }

// The boxes of one tensor at a rank, by placements over the plan's mesh.
py::list BoxesByPlacements(const StoredPlan& plan, const Text& name, const std::vector<DimPlacement>& placements,
                           Rank rank) {
  const LayoutTensor& tensor = plan.layout().tensors()[OrThrow(plan.layout().IndexOf(name.value))];
  auto boxes = BoxesOf(Dims(tensor.shape.begin(), tensor.shape.end()), plan.mesh(), placements, rank);
  if (!boxes.ok()) throw StatusError(Annotate(boxes.status(), absl::StrCat("parameter \"", name.value, "\"")));
  py::list pairs;
  for (const LocalBox& local : *boxes) pairs.append(ToPair(local.box));
  return pairs;
}

py::dict StoredBoxes(const StoredPlan& plan, Rank rank) {
  py::dict by_name;
  for (const ShardBox& stored : OrThrow(BoxesOfShard(plan.layout(), OrThrow(plan.ShardOf(rank))))) {
    const py::str name = plan.layout().tensors()[stored.tensor].name;
    by_name.attr("setdefault")(name, py::list()).attr("append")(ToPair(stored.local.box));
  }
  return by_name;
}

// The shapes and formats of all parameters are compared by the caller, once: CheckReshard.
py::list Copies(const StoredPlan& from, const StoredPlan& to, Rank rank) {
  py::list copies;
  for (const RankCopy& each : OrThrow(CopiesOf(from, to, rank))) {
    const ShardCopy& copy = each.copy;
    copies.append(py::make_tuple(each.source, copy.source_bucket, copy.source_offset, copy.destination_bucket,
                                 copy.destination_offset, copy.num_elements));
  }
  return copies;
}

}  // namespace

void BindLayout(py::module_& module) {
  module.def(
      "replicates", [](const Text& name) { return DefaultDimRole(name.value) == DimRole::kReplicate; },
      py::arg("name"));
  py::class_<LayoutTensor>(module, "Tensor")
      .def(py::init(&CreateTensor), py::arg("name"), py::arg("shape"), py::arg("format"), py::arg("granule"),
           py::arg("tied_to"));
  py::class_<StoredPlan> plan(module, "Plan");
  DefinePickle(module, plan, "plan", &ToState, &FromState);
  plan.def(py::init(&CreatePlan), py::arg("mesh"), py::arg("replicate"), py::arg("tensors"),
           py::arg("bucket_elements") = py::none(), py::arg("max_padding") = py::none(),
           py::arg("max_coarse_padding") = py::none())
      .def_property_readonly("mesh", [](const StoredPlan& plan) { return Mesh(plan.mesh()); })
      .def_property_readonly("hash", &StoredPlan::hash)
      .def_property_readonly("num_shards", [](const StoredPlan& plan) { return plan.layout().num_shards(); })
      .def_property_readonly("buckets", &Buckets)
      .def_property_readonly("padding", &Padding)
      .def("place", &PlaceOf, py::arg("name"))
      .def("parts", &PartsOf, py::arg("name"))
      .def("boxes", &BoxesByPlacements, py::arg("name"), py::arg("placements"), py::arg("rank"))
      .def("stored_boxes", &StoredBoxes, py::arg("rank"))
      .def(
          "check_reshard",
          [](const StoredPlan& from, const StoredPlan& to) {
            const absl::Status status = CheckReshard(from.layout(), to.layout());
            if (!status.ok()) throw StatusError(status);
          },
          py::arg("to"))
      .def("copies_into", &Copies, py::arg("to"), py::arg("rank"))
      .def_property_readonly("shapes", &Shapes)
      .def("picture", [](const StoredPlan& plan) { return Picture(plan); });
}

}  // namespace shardmesh::python
