// CallAgainWhile: what fails because somebody is away is repeated until it is back. Of a job's members: CallAgain
// (client.h).
#pragma once

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/sync.h"

namespace shardmesh {

// Waits without spinning; nobody signals.
inline void Pause(absl::Duration duration) {
  Mutex mu;
  CondVar never;
  MutexLock lock(mu);
  never.WaitFor(mu, duration);
}

// How long a call may take that is repeated until `deadline`: at most `longest`; the last one gets the time to be
// answered.
inline absl::Duration TimeOfCall(absl::Time deadline, absl::Duration longest) {
  constexpr absl::Duration kShortest = absl::Milliseconds(100);
  return std::min(longest, std::max(deadline - MonotonicNow(), kShortest));
}

// The status of what a call gives: an absl::Status, or what has a status(), as an absl::StatusOr.
inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename Result>
auto StatusOf(const Result& result) -> decltype(result.status()) {
  return result.status();
}

// `call` gives what StatusOf takes, and may be repeated. While `may_again()` says so, and until it gives something else
// than Unavailable, for at most `patience`.
template <typename May, typename Call>
auto CallAgainWhile(const May& may_again, absl::Duration patience, Call call) -> decltype(call()) {
  const absl::Time until = MonotonicNow() + patience;
  while (true) {
    auto result = call();
    if (!absl::IsUnavailable(StatusOf(result)) || !may_again() || MonotonicNow() >= until) return result;
    Pause(absl::Milliseconds(10));
  }
}

}  // namespace shardmesh
