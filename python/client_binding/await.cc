#include "python/client_binding/await.h"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/thread.h"

namespace shardmesh::python {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(50);

}  // namespace

void Ended::Set() {
  MutexLock lock(mu_);
  ended_ = true;
  changed_.SignalAll();
}

bool Ended::WaitFor(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(mu_);
  while (!ended_) {
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) break;
    changed_.WaitFor(mu_, left);
  }
  return ended_;
}

// Not by pybind11's guard, whose destructor takes the lock back: in an interpreter that is ending that unwinds the
// thread, which a destructor may not.
bool AwaitEnd(Ended& ended, absl::Time deadline, const Look& look) {
  while (true) {
    const absl::Duration left = deadline - MonotonicNow();
    PyThreadState* const state = PyEval_SaveThread();
    const bool has_ended = ended.WaitFor(std::max(absl::ZeroDuration(), std::min(left, kSlice)));
    PyEval_RestoreThread(state);
    if (has_ended) return true;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (look && !look()) return false;
    if (left <= absl::ZeroDuration()) return false;
  }
}

absl::Status StartThread(std::function<void()> call) {
  ASSIGN_OR_RETURN(std::thread thread, shardmesh::StartThread("a call", std::move(call)));
  thread.detach();
  return absl::OkStatus();
}

absl::Status CaughtStatus() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("it does not fit into this process's memory");
  } catch (const std::length_error&) {
    return absl::ResourceExhaustedError("it does not fit into any memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  } catch (...) {
    return absl::InternalError("an exception of another type");
  }
}

}  // namespace shardmesh::python
