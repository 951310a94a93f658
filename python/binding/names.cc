#include "core/names.h"

#include <optional>

#include "python/binding/binding.h"

namespace shardmesh::python {
namespace {

using Strings = std::vector<std::string>;

NameRules ToRules(Strings root_wrappers, const Strings& literal, const Strings& wrapped_at) {
  NameRules rules;
  rules.root_wrappers = std::move(root_wrappers);
  rules.literal.insert(literal.begin(), literal.end());
  rules.wrapped_at.insert(wrapped_at.begin(), wrapped_at.end());
  return rules;
}

Canonicalizer CreateCanonicalizer(Strings root_wrappers, const Strings& literal, const Strings& wrapped_at) {
  return OrThrow(Canonicalizer::Create(ToRules(std::move(root_wrappers), literal, wrapped_at)));
}

AliasTable CreateTable(Strings root_wrappers, const Strings& literal, const Strings& wrapped_at) {
  const NameRules rules = ToRules(std::move(root_wrappers), literal, wrapped_at);
  if (const absl::Status status = ValidateNameRules(rules); !status.ok()) throw StatusError(status);
  return AliasTable(rules);
}

std::string Add(AliasTable& table, const std::string& raw, const std::optional<std::string>& tied_to) {
  return OrThrow(tied_to.has_value() ? table.Add(raw, *tied_to) : table.Add(raw));
}

// A binding of one of the look-ups.
template <typename Result>
auto LookUp(absl::StatusOr<Result> (AliasTable::*look_up)(absl::string_view) const) {
  return [look_up](const AliasTable& table, const std::string& name) { return OrThrow((table.*look_up)(name)); };
}

}  // namespace

void BindNames(py::module_& module) {
  py::class_<Canonicalizer>(module, "Canonicalizer")
      .def(py::init(&CreateCanonicalizer), py::arg("root_wrappers"), py::arg("literal"), py::arg("wrapped_at"))
      .def(
          "canonical",
          [](const Canonicalizer& canonicalizer, const std::string& raw) {
            return OrThrow(canonicalizer.Canonical(raw));
          },
          py::arg("raw"));
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
