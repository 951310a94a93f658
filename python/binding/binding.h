// What the parts of the extension module share: how a Status becomes an exception, and how ids become Python's.
//
// One Bind function for each header of core/ and kernels/ that is bound; python/shardmesh/_core.pyi repeats their
// signatures. Everything here runs with the interpreter's lock held.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/box.h"
#include "core/bucket_layout.h"
#include "core/ids.h"
#include "core/mesh.h"
#include "core/names.h"
#include "core/placement.h"
#include "core/stored_plan.h"
#include "core/view.h"

namespace shardmesh::python {

namespace py = pybind11;

// Becomes the exception of shardmesh.errors that is named after the code.
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)), message_(status_.message()) {}  // not OK
  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  absl::Status status_;
  std::string message_;
};

template <typename T>
T OrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) throw StatusError(result.status());
  return *std::move(result);
}

// A number as an argument: see its caster below.
struct Integer {
  int64_t value = 0;
};

inline std::vector<int64_t> ToVector(const std::vector<Integer>& numbers) {
  std::vector<int64_t> values;
  for (const Integer& number : numbers) values.push_back(number.value);
  return values;
}

// An int for a message: its value, or its size when that has more digits than anyone reads.
inline std::string ValueOf(py::handle number) {
  const auto bits = number.attr("bit_length")().cast<int64_t>();
  return bits <= 128 ? py::str(number).cast<std::string>() : absl::StrCat("an integer of ", bits, " bits");
}

// Text as an argument: see its caster below.
struct Text {
  std::string value;
};

inline std::vector<std::string> ToVector(std::vector<Text> texts) {
  std::vector<std::string> values;
  for (Text& text : texts) values.push_back(std::move(text.value));
  return values;
}

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

void BindErrors(py::module_& module);
void BindMesh(py::module_& module);
void BindNames(py::module_& module);
void BindPlacement(py::module_& module);
void BindViews(py::module_& module);
void BindLayout(py::module_& module);
void BindNumerics(py::module_& module);
void BindStep(py::module_& module);

}  // namespace shardmesh::python

namespace pybind11::detail {

// Any Python int; one beyond 64 bits is InvalidArgument with its value, not a TypeError about the call.
template <>
struct type_caster<shardmesh::python::Integer> {
  PYBIND11_TYPE_CASTER(shardmesh::python::Integer, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<int64_t> number;
    if (number.load(source, convert)) {
      value.value = cast_op<int64_t>(number);
      return true;
    }
    if (!PyLong_Check(source.ptr())) return false;
    throw shardmesh::python::StatusError(absl::InvalidArgumentError(
        absl::StrCat(shardmesh::python::ValueOf(source), " is beyond 64 bits: numbers lie from -2^63 to 2^63 - 1")));
  }
};

// Any Python str, or bytes. A str that has no UTF-8 (a surrogate without its other half) is InvalidArgument, not a
// TypeError about the call.
template <>
struct type_caster<shardmesh::python::Text> {
  PYBIND11_TYPE_CASTER(shardmesh::python::Text, const_name("str"));

  bool load(handle source, bool convert) {
    make_caster<std::string> text;
    if (text.load(source, convert)) {
      value.value = cast_op<std::string&&>(std::move(text));
      return true;
    }
    if (!PyUnicode_Check(source.ptr())) return false;
    throw shardmesh::python::StatusError(absl::InvalidArgumentError(
        absl::StrCat("the text ", repr(source).cast<std::string>().substr(0, 200),
                     " has a surrogate without its other half; give text that UTF-8 can write")));
  }
};

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

// For every class that is bound: refuses an object that __new__ alone made, where pybind11 would hand out memory that
// no constructor has seen.
template <typename T>
struct ConstructedCaster : type_caster_base<T> {
  bool load(handle source, bool convert) {
    if (isinstance<T>(source)) {
      auto* object = reinterpret_cast<instance*>(source.ptr());
      if (!object->get_value_and_holder(get_type_info(typeid(T))).holder_constructed()) return false;
    }
    return type_caster_base<T>::load(source, convert);
  }
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
