#include "core/names/names.h"

#include <optional>

#include "core/names/optimizer_names.h"
#include "python/binding/binding.h"

namespace shardmesh::python {
namespace {

using Texts = std::vector<Text>;

NameRules ToRules(Texts root_wrappers, Texts literal, Texts wrapped_at) {
  NameRules rules;
  rules.root_wrappers = ToVector(std::move(root_wrappers));
  for (Text& text : literal) rules.literal.insert(std::move(text.value));
  for (Text& text : wrapped_at) rules.wrapped_at.insert(std::move(text.value));
  return rules;
}

Canonicalizer CreateCanonicalizer(Texts root_wrappers, Texts literal, Texts wrapped_at) {
  return OrThrow(Canonicalizer::Create(ToRules(std::move(root_wrappers), std::move(literal), std::move(wrapped_at))));
}

AliasTable CreateTable(Texts root_wrappers, Texts literal, Texts wrapped_at) {
  const NameRules rules = ToRules(std::move(root_wrappers), std::move(literal), std::move(wrapped_at));
  if (const absl::Status status = ValidateNameRules(rules); !status.ok()) throw StatusError(status);
  return AliasTable(rules);
}

std::string Add(AliasTable& table, const Text& raw, const std::optional<Text>& tied_to) {
  return OrThrow(tied_to.has_value() ? table.Add(raw.value, tied_to->value) : table.Add(raw.value));
}

// (prefix, kind, parameter, state).
py::tuple Parse(const Text& name, Texts prefixes) {
  const OptimizerName parsed = OrThrow(ParseOptimizerName(name.value, ToVector(std::move(prefixes))));
  const char* kind = parsed.kind == OptimizerNameKind::kState ? "state" : "param_groups";
  return py::make_tuple(parsed.prefix, kind, parsed.parameter, parsed.state);
}

std::string CanonicalState(const Canonicalizer& parameters, const Text& raw, Texts prefixes) {
  return OrThrow(CanonicalOptimizerName(raw.value, parameters, ToVector(std::move(prefixes))));
}

// A binding of one of the look-ups.
template <typename Result>
auto LookUp(absl::StatusOr<Result> (AliasTable::*look_up)(absl::string_view) const) {
  return [look_up](const AliasTable& table, const Text& name) { return OrThrow((table.*look_up)(name.value)); };
}

}  // namespace

void BindNames(py::module_& module) {
  py::class_<Canonicalizer>(module, "Canonicalizer")
      .def(py::init(&CreateCanonicalizer), py::arg("root_wrappers"), py::arg("literal"), py::arg("wrapped_at"))
      .def(
          "canonical",
          [](const Canonicalizer& canonicalizer, const Text& raw) {
            return OrThrow(canonicalizer.Canonical(raw.value));
          },
          py::arg("raw"))
      .def("canonical_optimizer", &CanonicalState, py::arg("raw"), py::arg("prefixes"));
  module.def("parse_optimizer", &Parse, py::arg("name"), py::arg("prefixes"));
  py::class_<AliasTable>(module, "AliasTable")
      .def(py::init(&CreateTable), py::arg("root_wrappers"), py::arg("literal"), py::arg("wrapped_at"))
      .def("add", &Add, py::arg("raw"), py::arg("tied_to") = py::none())
      .def("canonical", LookUp(&AliasTable::CanonicalOf), py::arg("raw"))
      .def("raw", LookUp(&AliasTable::RawOf), py::arg("canonical"))
      .def("storage", LookUp(&AliasTable::StorageOf), py::arg("canonical"))
      .def("export_names", LookUp(&AliasTable::ExportNames), py::arg("canonical"))
      .def_property_readonly("storages", &AliasTable::Storages)
      .def("__len__", &AliasTable::num_raw_names);
}

}  // namespace shardmesh::python
