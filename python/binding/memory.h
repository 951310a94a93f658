// The memory of arrays that Python hands in: C-contiguous buffers of as many bytes as are expected.
#pragma once

#include <cstdint>

#include "python/binding/binding.h"

namespace shardmesh::python {

// Borrowed until destruction, which needs the interpreter's lock. InvalidArgument: no such buffer, read-only where it
// is to be written, or of another length.
class Memory {
 public:
  Memory(py::handle array, int64_t bytes, bool writable, absl::string_view name) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      throw StatusError(absl::InvalidArgumentError(
          absl::StrCat(name, " is no contiguous array", writable ? " that may be written" : "")));
    }
    if (view_.len == bytes) return;
    const auto length = static_cast<int64_t>(view_.len);
    PyBuffer_Release(&view_);
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(name, " has ", length, " bytes; it must have ", bytes)));
  }
  ~Memory() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Memory(Memory&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Memory& operator=(Memory&&) = delete;

  void* data() const { return view_.buf; }

 private:
  Py_buffer view_ = {};
};

// A number of 64 bits without a sign. InvalidArgument: it lies beyond them.
inline uint64_t Unsigned64(const py::int_& number, absl::string_view name) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
  if (!PyErr_Occurred()) return value;
  PyErr_Clear();
  throw StatusError(
      absl::InvalidArgumentError(absl::StrCat(name, " is ", ValueOf(number), "; it lies from 0 to 2^64 - 1")));
}

// A tensor's number. InvalidArgument: beyond 32 bits.
inline uint32_t TensorNumber(Integer tensor) {
  if (tensor.value == static_cast<uint32_t>(tensor.value)) return static_cast<uint32_t>(tensor.value);
  throw StatusError(
      absl::InvalidArgumentError(absl::StrCat("tensor is ", tensor.value, "; it lies from 0 to 2^32 - 1")));
}

}  // namespace shardmesh::python
