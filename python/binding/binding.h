// What the parts of the extension module share: how a Status becomes an exception, and how ids become Python's.
//
// One Bind function for each header of core/ and kernels/ that is bound; python/shardmesh/_core.pyi repeats their
// signatures. Everything here runs with the interpreter's lock held.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/base/ids.h"
#include "core/layout/bucket_layout.h"
#include "core/layout/stored_plan.h"
#include "core/mesh/mesh.h"
#include "core/names/names.h"
#include "core/view/box.h"
#include "core/view/placement.h"
#include "core/view/view.h"
#include "python/binding/arguments.h"
#include "python/binding/constructed.h"
#include "python/binding/errors.h"

namespace shardmesh::python {

namespace py = pybind11;

// One name, or a sequence of them. (pybind11 takes no string for a sequence.)
using Names = std::variant<Text, std::vector<Text>>;

inline std::vector<std::string> ToVector(Names names) {
  if (auto* one = std::get_if<Text>(&names)) return {std::move(one->value)};
  return ToVector(std::get<std::vector<Text>>(std::move(names)));
}

template <typename Values>
py::tuple ToTuple(const Values& values) {
  py::tuple tuple(values.size());
  for (size_t i = 0; i < tuple.size(); ++i) tuple[i] = values[i];
  return tuple;
}

// A dimension of a tensor. InvalidArgument: no tensor has it, and core/'s int could not hold it.
inline int DimOf(Integer dim) {
  if (dim.value == static_cast<int>(dim.value)) return static_cast<int>(dim.value);
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("no tensor has a dimension ", dim.value, "; they count from 0 to ", kMaxTensorDims - 1)));
}

void BindMesh(py::module_& module);
void BindNames(py::module_& module);
void BindPlacement(py::module_& module);
void BindViews(py::module_& module);
void BindLayout(py::module_& module);
void BindNumerics(py::module_& module);
void BindStep(py::module_& module);
void BindSupport(py::module_& module);

}  // namespace shardmesh::python

namespace pybind11::detail {

// A rank is an int. InvalidArgument (not a silent cut) beyond 32 bits.
template <>
struct type_caster<shardmesh::Rank> {
  PYBIND11_TYPE_CASTER(shardmesh::Rank, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<shardmesh::python::Integer> number;
    if (!number.load(source, convert)) return false;
    const int64_t rank = cast_op<shardmesh::python::Integer&>(number).value;
    if (rank != static_cast<int32_t>(rank)) {
      throw shardmesh::python::StatusError(absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " is none: ranks lie from 0 to ", std::numeric_limits<int32_t>::max())));
    }
    value = shardmesh::Rank(static_cast<int32_t>(rank));
    return true;
  }

  static handle cast(shardmesh::Rank rank, return_value_policy, handle) { return PyLong_FromLong(rank.value()); }
};

template <>
struct type_caster<shardmesh::Mesh> : ConstructedCaster<shardmesh::Mesh> {};
template <>
struct type_caster<shardmesh::Canonicalizer> : ConstructedCaster<shardmesh::Canonicalizer> {};
template <>
struct type_caster<shardmesh::AliasTable> : ConstructedCaster<shardmesh::AliasTable> {};
template <>
struct type_caster<shardmesh::LayoutTensor> : ConstructedCaster<shardmesh::LayoutTensor> {};
template <>
struct type_caster<shardmesh::DimPlacement> : ConstructedCaster<shardmesh::DimPlacement> {};
template <>
struct type_caster<shardmesh::TensorView> : ConstructedCaster<shardmesh::TensorView> {};
template <>
struct type_caster<shardmesh::StoredPlan> : ConstructedCaster<shardmesh::StoredPlan> {};

}  // namespace pybind11::detail
