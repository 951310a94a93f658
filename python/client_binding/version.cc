#include <tuple>
#include <utility>

#include "core/base/status.h"
#include "core/format/format.h"
#include "core/format/gather_format.h"
#include "python/client_binding/binding.h"
#include "python/client_binding/memory.h"

namespace shardmesh::python {
namespace {

const std::shared_ptr<const HeldVersion>& HeldBy(const BoundVersion& version) {
  if (version.held != nullptr) return version.held;
  throw StatusError(absl::FailedPreconditionError(absl::StrCat(
      "version ", version.step.value(), " was let go; take arrays of it, which keep it, while it is held")));
}

// (canonical name of the storage, shape, format, parts).
py::tuple TensorOf(const BoundVersion& version, const Text& name) {
  const std::shared_ptr<const HeldVersion>& held = HeldBy(version);
  const Job& job = held->job();
  const ParameterSpec& parameter = job.spec().parameters[OrThrow(job.Resolve(name.value))];
  const ConstTensorView view = OrThrow(held->parameter(name.value));
  const absl::string_view format =
      view.gather == GatherFormat::kStored ? FormatName(view.format) : GatherFormatName(view.gather);
  return py::make_tuple(parameter.name, py::tuple(py::cast(parameter.shape)), std::string(format),
                        PartsOf(held, view, parameter.shape));
}

// (canonical name, shape, the name whose storage it has), tied ones too.
py::list ParametersOf(const BoundVersion& version) {
  const JobSpec& spec = HeldBy(version)->job().spec();
  py::list list;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& owner = spec.parameters[spec.StorageOf(static_cast<int>(i))];
    list.append(py::make_tuple(spec.parameters[i].name, py::tuple(py::cast(owner.shape)), owner.name));
  }
  return list;
}

}  // namespace

void BindVersion(py::module_& module) {
  py::class_<BoundVersion>(module, "Version")
      .def_property_readonly("step", [](const BoundVersion& version) { return version.step.value(); })
      .def_property_readonly("epoch", [](const BoundVersion& version) { return version.epoch.value(); })
      .def_readonly("attached", &BoundVersion::attached)
      .def_property_readonly("held", [](const BoundVersion& version) { return version.held != nullptr; })
      .def_property_readonly("parameters", &ParametersOf)
      .def("tensor", &TensorOf, py::arg("name"))
      .def("close", [](BoundVersion& version) { version.held = nullptr; });
}

}  // namespace shardmesh::python
