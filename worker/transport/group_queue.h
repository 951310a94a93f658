// GroupQueue: the calls of a group, one after the other on a thread of its own, while the caller does something else.
//
//   GroupQueue queue(std::move(group));
//   GroupCall gather = queue.Submit([=](Group& group) { return group.AllGather(mine, all, bytes, timeout); });
//   ...
//   RETURN_IF_ERROR(gather.Wait(timeout));
//
// All ranks submit the same calls in the same order. A call's own time limit begins with the call, not in the queue.
// After a failed call those behind it fail as well: their group is over. Thread-safe; handles outlive the queue.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "core/base/sync.h"
#include "worker/transport/group.h"

namespace shardmesh {

// One call. Copies are of the same call.
class GroupCall {
 public:
  // Its result. DeadlineExceeded: it is not done yet, and goes on.
  absl::Status Wait(absl::Duration timeout) const;
  bool Done() const;

 private:
  friend class GroupQueue;
  struct State {
    Mutex mu;
    CondVar changed;
    bool done ABSL_GUARDED_BY(mu) = false;
    absl::Status status ABSL_GUARDED_BY(mu);
  };
  static void Finish(State& state, const absl::Status& status);

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class GroupQueue {
 public:
  explicit GroupQueue(std::unique_ptr<Group> group);
  // Ends the group if calls are left; they fail with Aborted.
  ~GroupQueue();
  GroupQueue(const GroupQueue&) = delete;
  GroupQueue& operator=(const GroupQueue&) = delete;

  // What `call` needs has to last until it is done.
  GroupCall Submit(std::function<absl::Status(Group&)> call);

  // For Abort, and for what the group is; not for calls.
  Group& group() { return *group_; }

 private:
  struct Entry {
    std::function<absl::Status(Group&)> call;
    GroupCall handle;
  };

  void Loop();
  bool Next(Entry& entry);

  const std::unique_ptr<Group> group_;
  Mutex mu_;
  CondVar changed_;
  std::deque<Entry> waiting_ ABSL_GUARDED_BY(mu_);
  bool under_way_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace shardmesh
