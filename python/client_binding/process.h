// One process: connections, threads and holds do not survive fork(2), and what a child did with its copies of them
// would be done to its parent's.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"

namespace shardmesh::python {

// Called where the service is used: the first process is the one that may. FailedPrecondition: another one, its child.
absl::Status EnterProcess();

// The same object; a child of this process, which has a copy of it, does not destroy that.
template <typename T>
std::shared_ptr<T> OfThisProcess(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return std::shared_ptr<T>(raw, [object = std::move(object), made_by = getpid()](T*) mutable {
    if (getpid() != made_by) new std::shared_ptr<T>(std::move(object));  // never deleted
  });
}

}  // namespace shardmesh::python
