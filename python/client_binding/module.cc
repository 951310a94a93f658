// The extension module shardmesh._client: the C++ client (client/cpp/) as Python sees it. Loaded after _core, which
// guards the calls of all classes that are bound.
#include "python/client_binding/binding.h"
#include "python/client_binding/memory.h"

PYBIND11_MODULE(_client, module) {
  module.doc() = "The C++ part of shardmesh.client; use it through that.";
  shardmesh::python::BindErrors(module);
  shardmesh::python::BindMemory(module);
  shardmesh::python::BindClient(module);
  shardmesh::python::BindVersion(module);
  shardmesh::python::BindReader(module);
  shardmesh::python::BindSession(module);
  shardmesh::python::BindPullingSession(module);
}
