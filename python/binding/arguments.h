// Numbers and text as arguments: whatever Python's int and str can hold is taken, or refused with a message that names
// the value. Shared by the package's extension modules.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "python/binding/errors.h"

namespace shardmesh::python {

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

}  // namespace pybind11::detail
