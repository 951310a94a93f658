#include <memory>
#include <optional>

#include "kernels/encode/encode.h"
#include "python/binding/memory.h"

namespace pybind11::detail {

template <>
struct type_caster<shardmesh::CodeSpec> : ConstructedCaster<shardmesh::CodeSpec> {};

}  // namespace pybind11::detail

namespace shardmesh::python {
namespace {

using Integers = std::vector<Integer>;

// NumPy's names.
const char* TypeName(ElementType type) {
  constexpr const char* kNames[] = {"float32", "uint16", "int16", "uint8", "int8"};
  return kNames[static_cast<int>(type)];
}

DrawPurpose PurposeOf(const std::optional<Integer>& state) {
  if (!state.has_value()) return DrawPurpose::kWeightRounding;
  if (state->value >= 0 && state->value <= 2) {
    return static_cast<DrawPurpose>(static_cast<uint32_t>(DrawPurpose::kFirstState) + state->value);
  }
  throw StatusError(
      absl::InvalidArgumentError(absl::StrCat("state is ", state->value, "; it is 0, 1 or 2, or None for weights")));
}

CodeSpec CreateSpec(const Text& format, bool is_signed, bool torchao, bool e5m2, bool power_of_2, bool floor,
                    bool stochastic, const py::int_& seed, Integer step, Integer tensor, const py::int_& first_element,
                    const std::optional<Integer>& state) {
  CodeSpec spec;
  spec.format = OrThrow(ParseCodeFormat(format.value));
  spec.is_signed = is_signed;
  spec.torchao = torchao;
  spec.e5m2 = e5m2;
  spec.power_of_two = power_of_2;
  spec.floor = floor;
  spec.stochastic = stochastic;
  spec.seed = Unsigned64(seed, "seed");
  spec.step = step.value;
  spec.tensor = TensorNumber(tensor);
  spec.first_element = Unsigned64(first_element, "first_element");
  spec.purpose = PurposeOf(state);
  return spec;
}

// (name, NumPy's type, shape) of each part.
py::list Parts(const CodeSpec& spec, const Integers& shape) {
  py::list parts;
  for (const CodePart& part : OrThrow(PartsOf(spec, ToVector(shape)))) {
    parts.append(py::make_tuple(part.name, TypeName(part.type), ToTuple(part.dims)));
  }
  return parts;
}

int64_t ElementsOf(const std::vector<int64_t>& dims) {
  int64_t elements = 1;
  for (const int64_t size : dims) elements *= size;
  return elements;
}

std::vector<Memory> MemoryOf(const CodeSpec& spec, const std::vector<int64_t>& dims, const py::list& arrays,
                             bool writable) {
  const std::vector<CodePart> parts = OrThrow(PartsOf(spec, dims));
  std::vector<Memory> memory;
  for (size_t i = 0; i < std::min<size_t>(parts.size(), arrays.size()); ++i) {
    memory.emplace_back(arrays[i], parts[i].NumElements() * BytesOf(parts[i].type), writable, parts[i].name);
  }
  return memory;  // kernels/encode/encode.cc counts them
}

void CallEncode(const CodeSpec& spec, const Integers& shape, const py::object& array, const py::list& parts,
                const std::optional<float>& mean) {
  const std::vector<int64_t> dims = ToVector(shape);
  const std::vector<Memory> memory = MemoryOf(spec, dims, parts, true);
  const Memory values(array, ElementsOf(dims) * 4, false, "the array");
  std::vector<void*> pointers;
  for (const Memory& part : memory) pointers.push_back(part.data());
  absl::Status status;
  {
    const py::gil_scoped_release release;
    status =
        Encode(spec, dims, static_cast<const float*>(values.data()), pointers, mean.has_value() ? &*mean : nullptr);
  }
  if (!status.ok()) throw StatusError(status);
}

void CallDecode(const CodeSpec& spec, const Integers& shape, const py::list& parts, const py::object& array) {
  const std::vector<int64_t> dims = ToVector(shape);
  const std::vector<Memory> memory = MemoryOf(spec, dims, parts, false);
  const Memory values(array, ElementsOf(dims) * 4, true, "the array");
  std::vector<const void*> pointers;
  for (const Memory& part : memory) pointers.push_back(part.data());
  absl::Status status;
  {
    const py::gil_scoped_release release;
    status = Decode(spec, dims, pointers, static_cast<float*>(values.data()));
  }
  if (!status.ok()) throw StatusError(status);
}

}  // namespace

void BindNumerics(py::module_& module) {
  py::class_<CodeSpec>(module, "Code")
      .def(py::init(&CreateSpec), py::arg("format"), py::kw_only(), py::arg("signed"), py::arg("torchao"),
           py::arg("e5m2"), py::arg("power_of_2"), py::arg("floor"), py::arg("stochastic"), py::arg("seed"),
           py::arg("step"), py::arg("tensor"), py::arg("first_element"), py::arg("state"))
      .def("parts", &Parts, py::arg("shape"))
      .def("encode", &CallEncode, py::arg("shape"), py::arg("array"), py::arg("parts"), py::arg("mean") = py::none())
      .def("decode", &CallDecode, py::arg("shape"), py::arg("parts"), py::arg("array"));
}

}  // namespace shardmesh::python
