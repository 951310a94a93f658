// The extension module shardmesh._core: the pure parts of core/ and the numerics of kernels/, as Python sees them.
#include "python/binding/binding.h"

namespace shardmesh::python {
namespace {

ternaryfunc call_of_pybind11 = nullptr;

// pybind11's own call ends the process for a type without a bound class, such as the base of all that are bound.
PyObject* Call(PyObject* type, PyObject* arguments, PyObject* keywords) {
  auto* called = reinterpret_cast<PyTypeObject*>(type);
  if (py::detail::all_type_info(called).empty()) {
    PyErr_Format(PyExc_TypeError, "%.200s makes no objects", called->tp_name);
    return nullptr;
  }
  return call_of_pybind11(type, arguments, keywords);
}

void GuardCalls() {
  PyTypeObject* const metaclass = py::detail::get_internals().default_metaclass;
  call_of_pybind11 = metaclass->tp_call;
  metaclass->tp_call = &Call;
}

}  // namespace
}  // namespace shardmesh::python

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ part of shardmesh; use it through the package.";
  shardmesh::python::GuardCalls();
  shardmesh::python::BindErrors(module);
  shardmesh::python::BindMesh(module);
  shardmesh::python::BindNames(module);
  shardmesh::python::BindPlacement(module);
  shardmesh::python::BindViews(module);
  shardmesh::python::BindLayout(module);
  shardmesh::python::BindNumerics(module);
  shardmesh::python::BindStep(module);
  shardmesh::python::BindSupport(module);
}
