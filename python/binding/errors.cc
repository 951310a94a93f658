#include "python/binding/errors.h"

namespace shardmesh::python {
namespace {

// The class of shardmesh.errors; its Error for a code that has none.
py::object ExceptionOf(const absl::Status& status) {
  const py::module_ errors = py::module_::import("shardmesh.errors");
  return errors.attr("BY_CODE").attr("get")(absl::StatusCodeToString(status.code()), errors.attr("Error"));
}

// A message may quote bytes that are no UTF-8.
py::str Decoded(absl::string_view message) {
  PyObject* text = PyUnicode_DecodeUTF8(message.data(), static_cast<py::ssize_t>(message.size()), "backslashreplace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

}  // namespace

void BindErrors(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      PyErr_SetObject(ExceptionOf(error.status()).ptr(), Decoded(error.what()).ptr());
    }
  });
}

}  // namespace shardmesh::python
