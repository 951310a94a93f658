// HeartbeatRelay: gives the heartbeats of a host's workers to the coordinator together, in one message (hosts.proto).
//
// Workers that are answered at the same time send their next heartbeats at about the same time. The relay waits for all
// workers that it knows; but not longer than the options say, and less long for a heartbeat that differs from that
// worker's last one. Of one that does not differ, and that the coordinator has kept, only its place is sent. If all that
// come together are those of the last message and none differs, the message says that alone. Every second one of those is
// left out if it follows the last one soon enough for the coordinator, but not in a hurry, and the call stands; its workers
// are told what they were told last in this call.
// One thread. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "proto/shardmesh/v1/hosts.pb.h"

namespace shardmesh {

struct HeartbeatRelayOptions {
  absl::Duration wait = absl::Milliseconds(50);  // for others, of a heartbeat like the last one
  absl::Duration wait_with_news = absl::Milliseconds(5);
  absl::Duration give_up = absl::Seconds(2);       // a heartbeat that waited for longer is not sent: its worker did not
  absl::Duration renew_after = absl::Minutes(30);  // of a call: then another one begins
  absl::Duration hurry = absl::Milliseconds(250);  // workers that speak sooner again wait for news: none is left out
  int max_places = 1024;                // of workers in a call, and heartbeats in a message: what the coordinator takes
  int64_t max_message_bytes = 4 << 20;  // but for a single heartbeat that is larger
};

// A call of Hosts.Heartbeats. For one thread.
class HostsLink {
 public:
  virtual ~HostsLink() = default;
  // Sends a message, and returns its reply. `anew`: in a new call; so is the next one after an error.
  // Errors of the call; DeadlineExceeded: no reply came in time.
  virtual absl::StatusOr<v1::HostHeartbeatReplies> Exchange(const v1::HostHeartbeats& message, bool anew) = 0;
  // False: the call has ended, or its connection, as far as is known here. Does not wait.
  virtual bool Stands() = 0;
};

class HeartbeatRelay {
 public:
  // Called once, by the relay's thread or by that of the call that ends the wait.
  using Answer = std::function<void(absl::StatusOr<v1::HeartbeatReply>)>;

  explicit HeartbeatRelay(std::unique_ptr<HostsLink> link, HeartbeatRelayOptions options = {});
  ~HeartbeatRelay();  // as Stop

  // What the coordinator answers, or answered last to the same, with the incarnation that it would not refuse
  // (core/base/incarnation.h). Errors of
  // HostsLink::Exchange; Internal: the coordinator's reply is not to what was sent; Unavailable: the relay has stopped.
  // Aborted: another heartbeat of that worker came while this one waited. DeadlineExceeded: it waited too long.
  void Take(const v1::HeartbeatRequest& heartbeat, Answer answer) ABSL_LOCKS_EXCLUDED(mu_);

  // Answers all that wait, and ends the thread. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Waiting {
    std::string name;
    std::string bytes;  // of the heartbeat
    absl::Time since;
    Answer answer;
  };
  // A worker in this call.
  struct Known {
    int place = 0;
    bool kept = false;                        // the coordinator has its last heartbeat
    std::string bytes;                        // of that
    absl::StatusOr<v1::HeartbeatReply> told;  // the answer to that
  };

  void Loop();
  bool AwaitBatch() ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<Waiting> TakeBatch() ABSL_LOCKS_EXCLUDED(mu_);
  void DropOld() ABSL_LOCKS_EXCLUDED(mu_);
  bool IsNewsLocked(const Waiting& waiting) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Orders the batch by place.
  v1::HostHeartbeats MessageOf(std::vector<Waiting>& batch, bool& anew) ABSL_LOCKS_EXCLUDED(mu_);
  bool IsAgainLocked(const std::vector<Waiting>& batch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sends it, or leaves it out, and learns of the reply. The error of the whole message.
  absl::Status Send(const std::vector<Waiting>& batch, const v1::HostHeartbeats& message, bool anew)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Learn(const std::vector<Waiting>& batch, v1::HostHeartbeatReplies& replies) ABSL_LOCKS_EXCLUDED(mu_);

  const std::unique_ptr<HostsLink> link_;  // of the thread
  const HeartbeatRelayOptions options_;
  Mutex mu_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mu_);  // by arrival, one of each worker
  absl::Time send_at_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::map<std::string, Known> known_ ABSL_GUARDED_BY(mu_);  // by name
  absl::Time began_ ABSL_GUARDED_BY(mu_);                    // the call
  std::vector<std::string> last_;                            // of the thread: who was in the last message
  bool takes_again_ = false;                                 // of the thread: what the last reply said
  absl::Duration skip_within_;                               // of the thread: also that
  absl::Time sent_at_;                                       // of the thread: the last message
  bool skipped_ = false;                                     // of the thread: the one after it was left out
  std::thread thread_;
};

}  // namespace shardmesh
