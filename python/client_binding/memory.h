// Memory of the service as Python's buffers, which keep what it belongs to: a version, or a session.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/cpp/client.h"
#include "python/client_binding/binding.h"

namespace shardmesh::python {

class Bytes {
 public:
  std::shared_ptr<const void> owner;
  const void* data = nullptr;
  int64_t size = 0;
  bool writable = false;
};

// Parts of a tensor as arrays: a list of (name, type, shape, bytes), named as numerics.decode() has them.
py::list PartsOf(const std::shared_ptr<const void>& owner, const ConstTensorView& view,
                 const std::vector<int64_t>& shape, bool writable = false);

void BindMemory(py::module_& module);

}  // namespace shardmesh::python
