#include <tuple>
#include <utility>

#include "core/format.h"
#include "core/gather_format.h"
#include "core/status.h"
#include "python/client_binding/binding.h"

namespace shardmesh::python {
namespace {

// Bytes of a version, which they keep.
class Bytes {
 public:
  std::shared_ptr<const HeldVersion> held;
  const void* data = nullptr;
  int64_t size = 0;
};

using Shape = std::vector<int64_t>;

// Parts of a tensor as arrays: (name, type, shape, bytes), named as numerics.decode() has them.
class Parts {
 public:
  Parts(std::shared_ptr<const HeldVersion> held, const ConstTensorView& view, const Shape& shape)
      : held_(std::move(held)) {
    const bool stored = view.gather == GatherFormat::kStored, nf4 = view.gather == GatherFormat::kNf4;
    if (stored) {
      const char* const type = view.format == Format::kFp32 ? "float32" : "uint16";
      Add("codes", type, shape, view.data, view.data_bytes());
      return;
    }
    Add("codes", view.gather == GatherFormat::kInt8Row ? "int8" : "uint8", nf4 ? Shape{view.data_bytes()} : shape,
        view.data, view.data_bytes());
    const auto* const scales = static_cast<const char*>(view.scales);
    const int64_t count = view.num_scales;
    const char* const type = nf4 ? "int8" : view.gather == GatherFormat::kMx8 ? "uint8" : "float32";
    Add("scales", type, ScaleShape(view.gather, shape), scales, count * GatheredScaleBytes(view.gather));
    if (!nf4) return;
    const int64_t factors = Nf4FactorsOffset(count), mean = Nf4MeanOffset(count);
    Add("factors", "float32", {(mean - factors) / 4}, scales + factors, mean - factors);
    Add("mean", "float32", {}, scales + mean, 4);
  }

  py::list list;

 private:
  void Add(const char* name, const char* type, const Shape& shape, const void* data, int64_t size) {
    list.append(py::make_tuple(name, type, py::tuple(py::cast(shape)), Bytes{held_, data, size}));
  }

  const std::shared_ptr<const HeldVersion> held_;
};

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
                        Parts(held, view, parameter.shape).list);
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

py::buffer_info BufferOf(const Bytes& bytes) {
  return py::buffer_info(const_cast<void*>(bytes.data), 1, "B", 1, {bytes.size}, {1}, /*readonly=*/true);
}

}  // namespace

void BindVersion(py::module_& module) {
  py::class_<Bytes>(module, "Bytes", py::buffer_protocol()).def_buffer(&BufferOf);
  py::class_<BoundVersion>(module, "Version")
      .def_property_readonly("step", [](const BoundVersion& version) { return version.step.value(); })
      .def_readonly("attached", &BoundVersion::attached)
      .def_property_readonly("held", [](const BoundVersion& version) { return version.held != nullptr; })
      .def_property_readonly("parameters", &ParametersOf)
      .def("tensor", &TensorOf, py::arg("name"))
      .def("close", [](BoundVersion& version) { version.held = nullptr; });
}

}  // namespace shardmesh::python
