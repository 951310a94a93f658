// AttachedChannel: how an attached session talks with its worker: a grant, a UNIX socket over which each side hears of
// the other's death, and the mailbox behind the session's first gradient window, which the job's lead reads
// (local/memory/mailbox.h). Over the incarnations of a worker whose memory is retained it stays the same session. For
// one thread. It is the process's that opened it: one that is forked from it has neither connection nor slots
// (not_in_children.h), and its calls are FailedPrecondition.
#pragma once

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/local_attachment.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"
#include "local/memory/mailbox.h"
#include "local/memory/segment.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

class AttachedChannel {
 public:
  // The grant, the socket, the welcome. `slots`: none, of a job whose slots are pulled. Errors of Job::Attach.
  static absl::StatusOr<std::unique_ptr<AttachedChannel>> Open(std::shared_ptr<Job> job, Rank rank,
                                                               const std::vector<Slot>& slots, AttachOptions options);
  ~AttachedChannel();
  AttachedChannel(const AttachedChannel&) = delete;

  const v1::LocalWelcome& welcome() const { return welcome_; }
  std::vector<UniqueFd> TakeDescriptors() { return std::move(descriptors_); }
  // Maps what the welcome describes, before the first message: the parameter window, and a segment for each writer,
  // which has `writer_bytes` of gradients and the mailbox behind them. Internal: they are smaller than the plan says.
  // `writers` outlives the object.
  absl::Status Map(std::vector<UniqueFd> descriptors, int64_t window_bytes, int64_t writer_bytes, Segment& window,
                   std::vector<Segment>& writers);

  // A request over the socket and the reply to it; replies to older, repeated calls are passed over. Waits for
  // `timeout` and for as long as a worker may be silent. `what`: what did not happen in time.
  absl::StatusOr<v1::TrainerReply> Call(v1::TrainerRequest& request, absl::Duration timeout, absl::string_view what);
  // The same about a bucket of the parameter window.
  absl::Status UseBucket(v1::BucketUse::Kind kind, int bucket, absl::Duration timeout);
  // As requests have it: at least 1, at most a day.
  static int64_t Milliseconds(absl::Duration timeout);
  // A message and the answer to it, until `deadline`, which is `timeout` from when the caller began to count.
  //   DeadlineExceeded: what was waited for. Unavailable: the worker is gone or silent. Others: the answer's.
  absl::StatusOr<v1::TrainerReply> Send(v1::TrainerRequest& message, absl::Time deadline, absl::Duration timeout,
                                        absl::string_view what);
  // Leaves the job: the worker hears of it at once, and what is mapped stays. For any thread, also during a call of
  // another one, which then ends with Unavailable. Again: nothing.
  void Leave();
  // Session::awaited.
  const std::vector<v1::AwaitedTrainer>& awaited() const { return awaited_; }

 private:
  struct Wait {
    uint64_t id = 0;  // of the request; 0: a message
    absl::Time deadline;
    std::string late, for_what;
  };

  AttachedChannel(std::shared_ptr<Job> job, Rank rank, AttachOptions options)
      : job_(std::move(job)), rank_(rank), options_(options) {}
  absl::StatusOr<LocalAttachment> AskToAttach(const v1::AttachRequest& request, bool& refused);
  absl::Status Greet(const std::vector<Slot>& slots);
  void Begin(uint64_t id, absl::Time deadline, absl::string_view what, absl::Duration timeout);
  absl::Status Ask(const std::string& request);
  absl::Status ForgetOld();
  absl::StatusOr<std::optional<v1::TrainerReply>> Hear(absl::Duration timeout);
  absl::Status PostMessage(const std::string& message);
  absl::StatusOr<v1::TrainerReply> AwaitAnswer(uint64_t id);
  absl::Status HearOfMessage();
  v1::SessionHello Hello() const;
  absl::Status AwaitNextIncarnation(const absl::Status& cause);
  absl::Status Gone(const absl::Status& cause) const;
  absl::Status CheckProcess() const;
  void Notify();

  const std::shared_ptr<Job> job_;
  const Rank rank_;
  const AttachOptions options_;
  const pid_t pid_ = getpid();
  v1::LocalWelcome welcome_;
  std::vector<UniqueFd> descriptors_;
  Mutex mu_;  // held to replace socket_, by its thread, and to leave
  bool left_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<LocalSocket> socket_;
  std::string socket_path_;
  std::vector<int> slots_;  // the session's, or its seat
  bool retained_ = false;   // should the worker die it comes back
  int incarnations_ = 0;    // of the worker that this session came back to
  Mailbox* mailbox_ = nullptr;
  Segment notifier_;
  Wait wait_;
  std::vector<v1::AwaitedTrainer> awaited_;
  uint64_t last_id_ = 0;
  uint32_t messages_ = 0;
  absl::Duration silence_ = absl::Seconds(3);
  absl::Time last_heard_;  // of the worker, in a wait
  std::string bytes_;
};

// The member to attach to: of this host, where there are some; trainers spread over them by `number`.
absl::StatusOr<Rank> RankToAttachTo(const Job& job, int number);

}  // namespace shardmesh
