#include "core/mesh/mesh.h"

#include <optional>
#include <tuple>

#include "core/mesh/communicator_key.h"
#include "core/mesh/mesh_picture.h"
#include "python/binding/binding.h"
#include "python/binding/pickle.h"

namespace shardmesh::python {
namespace {

using Sizes = std::vector<int64_t>;

Mesh CreateMesh(const std::vector<Integer>& shape, std::vector<Text> texts, std::optional<std::vector<Rank>> ranks) {
  const Sizes sizes = ToVector(shape);
  const std::vector<std::string> names = ToVector(std::move(texts));
  return OrThrow(ranks.has_value() ? Mesh::Create(sizes, names, *std::move(ranks)) : Mesh::Create(sizes, names));
}

// Ranks [begin, end) as lists nested by sizes[depth], sizes[depth + 1], ...
py::list Nested(const Rank* begin, const Rank* end, const Sizes& sizes, size_t depth) {
  py::list list;
  const bool innermost = depth + 1 == sizes.size();
  const int64_t step = innermost ? 1 : (end - begin) / sizes[depth];
  for (const Rank* at = begin; at != end; at += step) {
    if (innermost) {
      list.append(*at);
    } else {
      list.append(Nested(at, at + step, sizes, depth + 1));
    }
  }
  return list;
}

py::list NestedInstances(const Mesh& mesh) {
  const Sizes sizes = mesh.Sizes();
  py::list instances;
  for (const auto& ranks : mesh.Instances()) {
    instances.append(Nested(ranks.data(), ranks.data() + ranks.size(), sizes, 0));
  }
  return instances;
}

py::dict Describe(const Mesh& mesh) {
  py::dict groups;
  for (const std::string& name : mesh.Names()) groups[py::str(name)] = OrThrow(mesh.Groups({name}));
  py::dict description;
  description["names"] = mesh.Names();
  description["sizes"] = mesh.Sizes();
  description["instances"] = NestedInstances(mesh);
  description["groups"] = groups;
  return description;
}

std::vector<Rank> AllRanks(const Mesh& mesh) {
  std::vector<Rank> all;
  for (const auto& ranks : mesh.Instances()) all.insert(all.end(), ranks.begin(), ranks.end());
  return all;
}

bool Equal(const Mesh& a, const Mesh& b) {
  return a.Names() == b.Names() && a.Sizes() == b.Sizes() && a.Instances() == b.Instances();
}

// Mesh::State; an axis is (name, size, stride, whether it is visible).
using Axis = std::tuple<std::string, int64_t, int64_t, bool>;
using State = std::tuple<std::vector<Rank>, std::vector<Rank>, std::vector<Axis>>;

State ToState(const Mesh& mesh) {
  Mesh::State state = mesh.ToState();
  std::vector<Axis> axes;
  for (Mesh::Axis& axis : state.axes) {
    axes.emplace_back(std::move(axis.layout.name), axis.layout.size, axis.layout.stride, axis.visible);
  }
  return {std::move(state.root), std::move(state.ranks), std::move(axes)};
}

Mesh FromState(const State& given) {
  Mesh::State state = {std::get<0>(given), std::get<1>(given), {}};
  for (const auto& [name, size, stride, visible] : std::get<2>(given)) {
    state.axes.push_back({{name, size, stride}, visible});
  }
  return OrThrow(Mesh::FromState(std::move(state)));
}

void DefineOperations(py::class_<Mesh>& type) {
  type.def(py::init(&CreateMesh), py::arg("shape"), py::arg("names"), py::arg("ranks") = py::none(),
           "A mesh of this shape, first dimension slowest, over the ranks 0, 1, 2, ... or over `ranks` in that order.");
  type.def(
      "slice", [](const Mesh& mesh, Names names) { return OrThrow(mesh.Slice(ToVector(std::move(names)))); },
      py::arg("names"), "Keeps the named dimensions, in the order of `names`.");
  type.def(
      "transpose", [](const Mesh& mesh, Names names) { return OrThrow(mesh.Transpose(ToVector(std::move(names)))); },
      py::arg("names"), "The same dimensions, in the order of `names`.");
  type.def(
      "flatten",
      [](const Mesh& mesh, Names names, const Text& into, bool keep_rest) {
        return OrThrow(mesh.Flatten(ToVector(std::move(names)), into.value, keep_rest));
      },
      py::arg("names"), py::arg("into"), py::arg("keep_rest") = true,
      "Makes one dimension `into` of the named ones, adjacent or not: the first named varies slowest.\n"
      "keep_rest=False: of this dimension alone, the others are sliced away.");
  type.def(
      "unflatten",
      [](const Mesh& mesh, const Text& name, const std::vector<Integer>& sizes, std::vector<Text> names) {
        return OrThrow(mesh.Unflatten(name.value, ToVector(sizes), ToVector(std::move(names))));
      },
      py::arg("name"), py::arg("sizes"), py::arg("names"),
      "Splits one dimension into `names` of `sizes`, the first slowest, in its place.");
  type.def_static(
      "concatenate", [](const std::vector<Mesh>& parts) { return OrThrow(Mesh::Concatenate(parts)); }, py::arg("parts"),
      "The dimensions of `parts`, slices of one mesh, side by side in this order.");
  type.def(
      "restrict", [](const Mesh& mesh, const std::vector<Rank>& ranks) { return OrThrow(mesh.Restrict(ranks)); },
      "The mesh of these ranks alone, which must be a full grid. They stay in this mesh's order, whatever that of\n"
      "`ranks`.");
}

void DefineQueries(py::class_<Mesh>& type) {
  type.def_property_readonly(
      "names", [](const Mesh& mesh) { return ToTuple(mesh.Names()); }, "The dimensions, slowest first.");
  type.def_property_readonly(
      "sizes", [](const Mesh& mesh) { return ToTuple(mesh.Sizes()); }, "The sizes of the dimensions.");
  type.def_property_readonly("ranks", &AllRanks, "Every rank once: the instances in their order, one after another.");
  type.def_property_readonly("instances", &NestedInstances,
                             "Every instance of this slice, as nested lists of ranks; one unless it is a slice.");
  type.def(
      "coordinate", [](const Mesh& mesh, Rank rank) { return ToTuple(OrThrow(mesh.CoordinatesOf(rank))); },
      py::arg("rank"), "Where the rank lies in its instance: a number for each dimension.");
  type.def(
      "instance", [](const Mesh& mesh, Rank rank) { return OrThrow(mesh.InstanceOf(rank)); }, py::arg("rank"),
      "The index of the instance that the rank lies in.");
  type.def(
      "rank_at",
      [](const Mesh& mesh, const std::vector<Integer>& coordinate, Integer instance) {
        return OrThrow(mesh.RankAt(ToVector(coordinate), instance.value));
      },
      py::arg("coordinate"), py::arg("instance") = 0, "The rank there: the inverse of coordinate() and instance().");
  type.def(
      "groups", [](const Mesh& mesh, Names names) { return OrThrow(mesh.Groups(ToVector(std::move(names)))); },
      py::arg("names"), "Every list of ranks that differ only along these dimensions, over all instances.");
  type.def(
      "group", [](const Mesh& mesh, Rank rank, const Text& name) { return OrThrow(mesh.GroupOf(rank, name.value)); },
      py::arg("rank"), py::arg("name"), "The one of groups(name) that the rank is in.");
  type.def("describe", &Describe,
           "{names, sizes, instances, groups}: what `shardctl mesh ... --json` prints, as an object.");
}

std::string KeyOf(std::vector<Rank> ranks) {
  if (ranks.empty()) {
    throw StatusError(absl::InvalidArgumentError("communicator_key: there is no rank; a group has at least one"));
  }
  for (const Rank rank : ranks) {
    if (rank >= Rank(0)) continue;
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("communicator_key: rank ", rank.value(), " is negative; ranks count from 0")));
  }
  return CommunicatorKey(std::move(ranks));
}

// Each as (key, ranks, [(index into `asked`, group)]).
py::list SharedCommunicators(std::vector<std::pair<Mesh, Names>> asked) {
  std::vector<MeshGroups> groups;
  for (auto& [mesh, names] : asked) groups.push_back({std::move(mesh), ToVector(std::move(names))});
  py::list communicators;
  for (const Communicator& communicator : OrThrow(Communicators(groups))) {
    py::list uses;
    for (const Communicator::Use& use : communicator.uses) uses.append(py::make_tuple(use.asked, use.group));
    communicators.append(py::make_tuple(communicator.key, communicator.ranks, uses));
  }
  return communicators;
}

}  // namespace

void BindMesh(py::module_& module) {
  py::class_<Mesh> type(module, "Mesh", "Which ranks of a job meet along which named dimension. Immutable.");
  DefineOperations(type);
  DefineQueries(type);
  type.def("__eq__", &Equal, py::is_operator());
  type.def("__hash__",
           [](const Mesh& mesh) { return py::hash(py::make_tuple(ToTuple(mesh.Names()), ToTuple(mesh.Sizes()))); });
  DefinePickle(module, type, "mesh", &ToState, &FromState);
  module.def("communicator_key", &KeyOf, py::arg("ranks"));
  module.def("communicators", &SharedCommunicators, py::arg("asked"));
  type.def("__str__", [](const Mesh& mesh) {
    std::string text = Picture(mesh);
    text.pop_back();  // print() ends the line
    return text;
  });
  type.def("__repr__", [](const Mesh& mesh) { return absl::StrCat("<shardmesh.", mesh.DebugString(), ">"); });
}

}  // namespace shardmesh::python
