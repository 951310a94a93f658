// KeepForever: what must outlive everything, such as memory that a device may still write: it stays until the process
// ends, and can be found by leak checkers. Thread-safe.
#pragma once

#include <utility>
#include <vector>

#include "core/base/sync.h"

namespace shardmesh {

template <class T>
void KeepForever(T value) {
  static auto* const mu = new Mutex;
  static auto* const kept = new std::vector<T>;
  MutexLock lock(*mu);
  kept->push_back(std::move(value));
}

}  // namespace shardmesh
