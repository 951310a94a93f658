// Await: a call of the C++ client that may take its time, on a thread of its own, while whoever asked waits without the
// interpreter's lock and looks at Python's signals, so that control-C ends the wait.
//
// The call has a deadline of its own; given up, it goes on until then, and what it returns is dropped. It touches
// nothing of Python. Functions are called with the interpreter's lock held.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "python/client_binding/process.h"

namespace shardmesh::python {

// Whether a call has ended. Thread-safe.
class Ended {
 public:
  void Set();
  bool WaitFor(absl::Duration timeout);

 private:
  Mutex mu_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// Looked at every 50 ms; false: the wait is given up. May throw.
using Look = std::function<bool()>;

// Returns whether it has ended, at the latest at the deadline. Throws what a handler of a signal, or `look`, throws.
bool AwaitEnd(Ended& ended, absl::Time deadline, const Look& look);

// Runs `call` on a thread. ResourceExhausted: there is none, with the limits of threads.
absl::Status StartThread(std::function<void()> call);

// The error that an exception of the standard library stands for, in a handler of one.
absl::Status CaughtStatus();

// A call under way.
template <typename T>
class Pending {
 public:
  static absl::StatusOr<std::shared_ptr<Pending>> Start(std::function<absl::StatusOr<T>()> call) {
    const auto pending = OfThisProcess(std::make_shared<Pending>());
    const absl::Status started = StartThread([pending, call = std::move(call)]() mutable {
      absl::StatusOr<T> result = absl::InternalError("no result");
      try {
        result = call();
      } catch (...) {
        result = CaughtStatus();
      }
      call = nullptr;  // what it holds is let go of before anybody hears that it ended
      pending->result_ = std::move(result);
      pending->ended_.Set();
    });
    if (!started.ok()) return started;
    return pending;
  }

  Ended& ended() { return ended_; }
  // Once. REQUIRES: it has ended.
  absl::StatusOr<T> Take() { return *std::exchange(result_, std::nullopt); }

 private:
  Ended ended_;
  std::optional<absl::StatusOr<T>> result_;
};

// The result of `call`. FailedPrecondition: in a forked child.
template <typename T>
absl::StatusOr<T> Await(std::function<absl::StatusOr<T>()> call, const Look& look = nullptr) {
  if (absl::Status status = EnterProcess(); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Pending<T>>> pending = Pending<T>::Start(std::move(call));
  if (!pending.ok()) return pending.status();
  if (!AwaitEnd((*pending)->ended(), absl::InfiniteFuture(), look)) return absl::CancelledError("given up");
  return (*pending)->Take();
}

}  // namespace shardmesh::python
