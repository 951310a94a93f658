// The extension module shardmesh._core: the pure parts of core/ and the numerics of kernels/, as Python sees them.
#include "python/binding/binding.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ part of shardmesh; use it through the package.";
  shardmesh::python::BindErrors(module);
  shardmesh::python::BindMesh(module);
  shardmesh::python::BindNames(module);
  shardmesh::python::BindPlacement(module);
  shardmesh::python::BindViews(module);
  shardmesh::python::BindLayout(module);
  shardmesh::python::BindNumerics(module);
  shardmesh::python::BindStep(module);
}
