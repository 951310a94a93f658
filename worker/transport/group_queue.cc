#include "worker/transport/group_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Seconds(1);  // a wait has a limit, although nothing is looked for

}  // namespace

absl::Status GroupCall::Wait(absl::Duration timeout) const {
  const absl::Time until = MonotonicNow() + timeout;
  MutexLock lock(state_->mu);
  while (!state_->done) {
    const absl::Duration left = until - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("the group's call is not done after ", absl::FormatDuration(timeout), "; it goes on"));
    }
    state_->changed.WaitFor(state_->mu, left);
  }
  return state_->status;
}

bool GroupCall::Done() const {
  MutexLock lock(state_->mu);
  return state_->done;
}

void GroupCall::Finish(State& state, const absl::Status& status) {
  MutexLock lock(state.mu);
  state.done = true;
  state.status = status;
  state.changed.SignalAll();
}

GroupQueue::GroupQueue(std::unique_ptr<Group> group) : group_(std::move(group)), thread_([this] { Loop(); }) {}

GroupQueue::~GroupQueue() {
  bool left = false;
  {
    MutexLock lock(mu_);
    closing_ = true;
    left = under_way_ || !waiting_.empty();
    changed_.SignalAll();
  }
  if (left) group_->Abort(absl::StrCat("rank ", group_->rank(), " closed its queue"));
  thread_.join();
}

GroupCall GroupQueue::Submit(std::function<absl::Status(Group&)> call) {
  Entry entry = {std::move(call), GroupCall()};
  GroupCall handle = entry.handle;
  MutexLock lock(mu_);
  waiting_.push_back(std::move(entry));
  changed_.SignalAll();
  return handle;
}

bool GroupQueue::Next(Entry& entry) {
  MutexLock lock(mu_);
  under_way_ = false;
  while (waiting_.empty()) {
    if (closing_) return false;
    changed_.WaitFor(mu_, kLook);
  }
  entry = std::move(waiting_.front());
  waiting_.pop_front();
  under_way_ = true;
  return true;
}

void GroupQueue::Loop() {
  Entry entry;
  while (Next(entry)) GroupCall::Finish(*entry.handle.state_, entry.call(*group_));
}

}  // namespace shardmesh
