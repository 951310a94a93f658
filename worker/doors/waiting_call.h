// WaitingCall: a unary call whose answer comes later: it waits among a job's Waiters without holding a thread, is
// answered once, and looks at its own deadline, so that a caller whose time runs out still learns what it waited for.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/sync.h"
#include "rpc/base/deadline.h"
#include "rpc/base/status.h"
#include "worker/job/waiters.h"

namespace shardmesh {

// The caller's deadline, a little earlier, so that the answer still reaches it. gRPC sends a time limit with three
// digits, rounded up (grpc-timeout): the deadline is known here as up to a hundredth of the time later than it is.
inline absl::Time AnswerBy(const grpc::CallbackServerContext& context) {
  const absl::Time deadline = DeadlineOf(context.raw_deadline());
  const absl::Duration left = deadline - MonotonicNow();
  return deadline - std::min(absl::Milliseconds(100) + left / 100, left / 4);
}

class WaitingCall final : public grpc::ServerUnaryReactor, public Waiter {
 public:
  // nullopt: not yet. A status: the answer (the reply was filled on OK). Called by one thread at a time.
  using Poll = std::function<std::optional<absl::Status>()>;
  // What to answer when the time is over.
  using Late = std::function<absl::Status()>;

  // The reactor to return to gRPC; it is kept by `waiters` until it is answered and by gRPC until it is done.
  static grpc::ServerUnaryReactor* Start(grpc::CallbackServerContext& context, Waiters& waiters, Poll poll, Late late) {
    std::shared_ptr<WaitingCall> call(new WaitingCall(AnswerBy(context), std::move(poll), std::move(late)));
    call->self_ = call;
    waiters.Add(call);
    return call.get();
  }

  bool Try() override {
    MutexLock lock(mu_);
    if (answered_) return true;
    std::optional<absl::Status> answer = poll_();
    if (!answer.has_value() && MonotonicNow() >= deadline_) answer = late_();
    if (!answer.has_value()) return false;
    answered_ = true;
    Finish(ToGrpc(*answer));
    return true;
  }

  void OnCancel() override {
    MutexLock lock(mu_);
    if (answered_) return;
    answered_ = true;
    Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller cancelled"));
  }

  void OnDone() override { const std::shared_ptr<WaitingCall> last = std::move(self_); }

 private:
  WaitingCall(absl::Time deadline, Poll poll, Late late)
      : deadline_(deadline), poll_(std::move(poll)), late_(std::move(late)) {}

  const absl::Time deadline_;
  const Poll poll_;
  const Late late_;
  std::shared_ptr<WaitingCall> self_;  // gRPC's reference
  Mutex mu_;
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace shardmesh
