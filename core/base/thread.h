// StartThread: a thread, or the reason why there is none. std::thread's own constructor throws when the system has no
// thread left, and what a peer asks for must not end the process. Thread-safe.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// `what` it is for, as in "the thread of a connection".
// ResourceExhausted: the system gives this process none; the message names the limits (ThreadLimits).
absl::StatusOr<std::thread> StartThread(absl::string_view what, std::function<void()> run);

// What a standard exception is to a caller. ResourceExhausted: no memory or no thread was left; Internal: another one.
absl::Status StatusOfException(const std::exception& error);

// Runs `fn`, which returns absl::Status, and gives an exception's status instead of passing it on.
template <typename Fn>
absl::Status WithoutThrowing(Fn&& fn) {
  try {
    return std::forward<Fn>(fn)();
  } catch (const std::exception& error) {
    return StatusOfException(error);
  }
}

// The limits of threads that apply to this process, as in "RLIMIT_NPROC is 45 and pids.max is max".
std::string ThreadLimits();

// FailedPrecondition: `threads` more at once cannot be had; the message has the limits. Makes that many, and ends them.
absl::Status CheckThreads(int threads);

}  // namespace shardmesh
