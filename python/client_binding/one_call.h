// OneCall: the calls of an object that is for one thread, which may take their time. Most end at once, and are made in
// place; one that does not goes on on a thread of its own (await.h), so that control-C ends the wait. A call that was
// given up so is waited for by the next one. Used with the interpreter's lock held, which calls let go of.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "python/client_binding/await.h"

namespace shardmesh::python {

struct Done {};  // what a call without a value returns

class OneCall {
 public:
  // `call` gets how long it may take; with `brief` it is made in place at first, and repeated after DeadlineExceeded,
  // which changes nothing. It holds what it uses. FailedPrecondition: another thread is in a call; a forked child.
  // DeadlineExceeded: also that one that was given up has not ended.
  template <typename T>
  absl::StatusOr<T> Run(std::function<absl::StatusOr<T>(absl::Duration)> call, absl::Duration timeout,
                        bool brief = true) {
    if (absl::Status status = Enter(timeout); !status.ok()) return status;
    struct Leave {
      bool& running;
      ~Leave() { running = false; }
    } leave{running_};
    absl::Duration left = timeout;
    if (brief) {
      const absl::Time deadline = MonotonicNow() + timeout;
      PyThreadState* const state = PyEval_SaveThread();
      absl::StatusOr<T> result = call(std::min(timeout, kAtOnce));
      PyEval_RestoreThread(state);
      left = deadline - MonotonicNow();
      if (!absl::IsDeadlineExceeded(result.status()) || left <= absl::ZeroDuration()) return result;
    }
    absl::StatusOr<std::shared_ptr<Pending<T>>> pending =
        Pending<T>::Start([call = std::move(call), left] { return call(left); });
    if (!pending.ok()) return pending.status();
    given_up_ = std::shared_ptr<Ended>(*pending, &(*pending)->ended());
    AwaitEnd(*given_up_, absl::InfiniteFuture(), nullptr);  // may throw
    given_up_ = nullptr;
    return (*pending)->Take();
  }

 private:
  static constexpr absl::Duration kAtOnce = absl::Milliseconds(50);

  absl::Status Enter(absl::Duration timeout) {
    if (absl::Status status = EnterProcess(); !status.ok()) return status;
    if (running_) return absl::FailedPreconditionError("another thread is in a call of this session");
    running_ = true;
    if (given_up_ != nullptr) {
      bool ended = false;
      try {
        ended = AwaitEnd(*given_up_, MonotonicNow() + timeout, nullptr);
      } catch (...) {
        running_ = false;
        throw;
      }
      if (!ended) {
        running_ = false;
        return absl::DeadlineExceededError("a call that was given up has not ended; call again");
      }
      given_up_ = nullptr;
    }
    return absl::OkStatus();
  }

  bool running_ = false;
  std::shared_ptr<Ended> given_up_;
};

}  // namespace shardmesh::python
