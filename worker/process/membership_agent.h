// MembershipAgent: keeps one worker joined to the coordinator: Join, then Heartbeat after Heartbeat, passing
// assignments to the Worker and its statuses back. When the coordinator is away, steps go on and it tries again; when
// the coordinator has forgotten this incarnation of the worker, it joins again; but not while it holds jobs: the
// coordinator then refuses with FAILED_PRECONDITION, since its state file is not the one of these jobs, and they go on.
// When the coordinator refuses this incarnation's incarnation and says which one it would take, the agent joins again
// with that: the wall clock was set back, or somebody else joined under this name. Each incarnation that it takes has a
// new secret, which nobody but the coordinator is told. One thread; Stop (or the destructor) ends it.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "client/cpp/transport/coordinator_transport.h"
#include "core/base/clock.h"
#include "core/base/sync.h"
#include "worker/process/worker.h"

namespace shardmesh {

class MembershipAgent {
 public:
  // `identity`: everything of the JoinRequest but the secret. Borrowed arguments outlive the object.
  MembershipAgent(CoordinatorTransport& coordinator, Worker& worker, v1::JoinRequest identity);
  ~MembershipAgent();

  // OK once the worker is joined. DeadlineExceeded: the coordinator did not answer in time; AlreadyExists: another live
  // worker has the name; Aborted: a newer incarnation of this worker was seen.
  absl::Status AwaitJoined(absl::Duration timeout);
  // As which it joined the last time; incarnation 0: it did not yet.
  struct Joined {
    int64_t incarnation = 0;
    absl::Duration heartbeat_timeout;
    friend bool operator!=(const Joined& a, const Joined& b) {
      return a.incarnation != b.incarnation || a.heartbeat_timeout != b.heartbeat_timeout;
    }
  };
  Joined joined() const;
  // Sends the next heartbeat now.
  void Hurry();
  // Leaves in order, and ends the thread.
  void Stop();

 private:
  void Loop();
  absl::Status Join();
  absl::Status Heartbeat();
  bool WaitForNext(absl::Duration interval);
  void TakeIncarnation(int64_t next, bool was_joined);

  CoordinatorTransport& coordinator_;
  Worker& worker_;
  v1::JoinRequest identity_;  // of the thread, and of who has ended it
  std::string other_build_;   // of the thread: said behind a job's failure; empty: the coordinator is of this build
  mutable Mutex mu_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool hurry_ ABSL_GUARDED_BY(mu_) = false;
  bool joined_ ABSL_GUARDED_BY(mu_) = false;
  Joined as_ ABSL_GUARDED_BY(mu_);
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
  absl::Duration interval_ ABSL_GUARDED_BY(mu_) = absl::Milliseconds(500);
  std::thread thread_;
};

}  // namespace shardmesh
