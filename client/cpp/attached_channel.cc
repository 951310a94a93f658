#include "client/cpp/attached_channel.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/local_attachment.h"
#include "client/cpp/next_incarnation.h"
#include "client/cpp/session_resume.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "local/process/host_id.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);  // at the socket, while a step waits: is the worker there?
constexpr absl::Duration kRetry = absl::Microseconds(100);
constexpr absl::Duration kFarewell = absl::Milliseconds(200);

absl::Status StatusOf(const v1::TrainerReply& reply) {
  return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
}

}  // namespace

absl::StatusOr<Rank> RankToAttachTo(const Job& job, int number) {
  ASSIGN_OR_RETURN(const std::string host_id, HostId());
  std::vector<int> local;
  for (const v1::Member& member : job.members()) {
    if (IsOnHost(member.host_id(), host_id)) local.push_back(member.rank());
  }
  if (local.empty()) return Rank(number % job.plan().num_ranks());  // which says why not
  return Rank(local[number % local.size()]);
}

absl::StatusOr<std::unique_ptr<AttachedChannel>> AttachedChannel::Open(std::shared_ptr<Job> job, Rank rank,
                                                                       const std::vector<Slot>& slots,
                                                                       AttachOptions options) {
  std::unique_ptr<AttachedChannel> channel(new AttachedChannel(std::move(job), rank, options));
  RETURN_IF_ERROR(channel->Greet(slots));
  return channel;
}

AttachedChannel::~AttachedChannel() { Leave(); }

// A next incarnation that has not heard of this session yet waits for it as long as this process lives: it is told.
// In a forked child nothing is left: the session is the parent's.
void AttachedChannel::Leave() {
  if (!CheckProcess().ok()) return;
  MutexLock lock(mu_);
  if (std::exchange(left_, true) || socket_ == nullptr) return;
  if (retained_ && absl::IsUnavailable(socket_->Receive(absl::ZeroDuration()).status())) {
    ResumeSession(socket_path_, Hello(), kFarewell).status().IgnoreError();
  }
  socket_->Shutdown();
}

// What the worker says to a new trainer. A worker whose memory is retained may die meanwhile: what it granted is
// unknown to its next incarnation.
absl::StatusOr<LocalAttachment> AttachedChannel::AskToAttach(const v1::AttachRequest& request, bool& refused) {
  v1::TrainerHello trainer;
  trainer.set_needs_all(options_.needs_all);
  ASSIGN_OR_RETURN(LocalAttachment attached, AttachAtWorker(*job_, rank_, request, trainer));
  const absl::Status said = attached.said();
  if (absl::IsPermissionDenied(said) && !std::exchange(refused, true)) return absl::UnavailableError(said.message());
  return attached;
}

absl::Status AttachedChannel::Greet(const std::vector<Slot>& slots) {
  v1::AttachRequest request;
  for (Slot slot : slots) request.add_slots(slot.value());
  bool refused = !job_->members()[rank_.value()].kept();
  ASSIGN_OR_RETURN(LocalAttachment attached,
                   CallAgain(*job_, rank_, job_->peer_timeout(), [&] { return AskToAttach(request, refused); }));
  RETURN_IF_ERROR(attached.said());
  socket_path_ = std::move(attached.socket_path);
  socket_ = std::make_unique<LocalSocket>(std::move(attached.socket));
  welcome_ = std::move(attached.welcome);
  descriptors_ = std::move(attached.descriptors);
  silence_ = absl::Milliseconds(welcome_.heartbeat_timeout_ms());
  retained_ = welcome_.retained();
  for (Slot slot : slots) slots_.push_back(slot.value());
  if (slots_.empty()) slots_.push_back(welcome_.seat());
  return absl::OkStatus();
}

absl::Status AttachedChannel::Map(std::vector<UniqueFd> descriptors, int64_t window_bytes, int64_t writer_bytes,
                                  Segment& window, std::vector<Segment>& writers) {
  const size_t last = 1 + slots_.size();  // the notifier
  if (descriptors.size() != last + 1 || welcome_.segments_size() != static_cast<int>(last + 1)) {
    return absl::InternalError(
        absl::StrCat("the worker sent ", descriptors.size(), " windows; ", last + 1, " expected"));
  }
  for (size_t i = 0; i <= last; ++i) {
    const v1::Segment& said = welcome_.segments(static_cast<int>(i));
    const int64_t needed = i == 0      ? window_bytes
                           : i == last ? kPageBytes
                                       : writer_bytes + static_cast<int64_t>(sizeof(Mailbox));
    if (said.num_bytes() - said.data_offset() < needed)
      return absl::InternalError("a window is smaller than the plan says");
    const auto access = i > 0                              ? Segment::Access::kReadWrite
                        : job_->options().writable_weights ? Segment::Access::kCopyOnWrite
                                                           : Segment::Access::kReadOnly;
    ASSIGN_OR_RETURN(Segment segment,
                     Segment::Map(std::move(descriptors[i]), said.num_bytes(), said.data_offset(), access));
    if (i > 0) segment.KeepFromChildren();  // the window's weights a child may read, and keeps its own writes
    if (i == 0) {
      window = std::move(segment);
    } else if (i == last) {
      notifier_ = std::move(segment);
    } else {
      writers.push_back(std::move(segment));
    }
  }
  mailbox_ = &MailboxAt(writers[0].data() + writer_bytes);
  return absl::OkStatus();
}

// What is waited for from here on.
void AttachedChannel::Begin(uint64_t id, absl::Time deadline, absl::string_view what, absl::Duration timeout) {
  last_heard_ = MonotonicNow();
  awaited_.clear();
  wait_ = {id, deadline, absl::StrCat(what, " within ", absl::FormatDuration(timeout)),
           "the worker did not say yet what is missing"};
}

// An answer that the worker sends over the socket within `timeout`; nullopt: none, but it is alive.
// Unavailable: it is gone, or silent for too long. DeadlineExceeded: of what is waited for.
absl::StatusOr<std::optional<v1::TrainerReply>> AttachedChannel::Hear(absl::Duration timeout) {
  const absl::StatusOr<LocalMessage> message = socket_->Receive(timeout);
  const absl::Time now = MonotonicNow();
  if (message.ok()) {
    v1::TrainerReply reply;
    if (!reply.ParseFromString(message->bytes))
      return absl::InternalError("the worker sent a message that is no reply");
    last_heard_ = now;
    if (reply.awaited_size() > 0 && reply.id() == wait_.id) {
      awaited_.assign(reply.awaited().begin(), reply.awaited().end());
    }
    if (!reply.alive()) return std::make_optional(std::move(reply));
    wait_.for_what = reply.message();
  } else if (!absl::IsDeadlineExceeded(message.status())) {
    RETURN_IF_ERROR(AwaitNextIncarnation(message.status()));
  }
  if (now - last_heard_ > silence_)
    return Gone(absl::UnavailableError(absl::StrCat("it sent nothing for ", absl::FormatDuration(silence_))));
  if (now < wait_.deadline) return std::optional<v1::TrainerReply>();
  return absl::DeadlineExceededError(absl::StrCat(wait_.late, "; ", wait_.for_what));
}

absl::StatusOr<v1::TrainerReply> AttachedChannel::Call(v1::TrainerRequest& request, absl::Duration timeout,
                                                       absl::string_view what) {
  RETURN_IF_ERROR(CheckProcess());
  request.set_id(++last_id_);
  const absl::Time deadline = MonotonicNow() + timeout + silence_;
  Begin(request.id(), deadline, what, timeout);
  const std::string asked = request.SerializeAsString();
  RETURN_IF_ERROR(Ask(asked));
  for (int incarnation = incarnations_; true;) {
    const absl::Duration left = std::max(deadline - MonotonicNow(), absl::ZeroDuration());
    ASSIGN_OR_RETURN(const std::optional<v1::TrainerReply> reply, Hear(std::min(silence_, left)));
    if (incarnations_ != incarnation) {  // which was not asked; what the last one did with the request counts
      RETURN_IF_ERROR(Ask(asked));
      incarnation = incarnations_;
    }
    if (!reply.has_value() || reply->id() != request.id()) continue;
    RETURN_IF_ERROR(StatusOf(*reply));
    return *reply;
  }
}

absl::Status AttachedChannel::UseBucket(v1::BucketUse::Kind kind, int bucket, absl::Duration timeout) {
  v1::TrainerRequest request;
  request.mutable_use()->set_kind(kind);
  request.mutable_use()->set_bucket(bucket);
  request.mutable_use()->set_timeout_ms(Milliseconds(timeout));
  return Call(request, timeout, absl::StrCat("bucket ", bucket, " was not there")).status();
}

int64_t AttachedChannel::Milliseconds(absl::Duration timeout) {
  return std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 1, int64_t{24} * 3600 * 1000);
}

// A request to the worker, or to its next incarnation, if that is the one that takes it.
absl::Status AttachedChannel::Ask(const std::string& request) {
  while (true) {
    const absl::Status sent = socket_->Send(request, {}, silence_);
    if (sent.ok()) return sent;
    if (!absl::IsUnavailable(sent)) return Gone(sent);
    RETURN_IF_ERROR(AwaitNextIncarnation(sent));
  }
}

absl::StatusOr<v1::TrainerReply> AttachedChannel::Send(v1::TrainerRequest& message, absl::Time deadline,
                                                       absl::Duration timeout, absl::string_view what) {
  RETURN_IF_ERROR(CheckProcess());
  message.set_session(welcome_.session());
  message.set_id(welcome_.session() << 32 | ++messages_);  // of no other session's message
  Begin(0, deadline, what, timeout);
  RETURN_IF_ERROR(ForgetOld());
  RETURN_IF_ERROR(PostMessage(message.SerializeAsString()));
  return AwaitAnswer(message.id());
}

// What the worker said of messages before this one does not count, and must not pile up. A worker that died since then
// must know who this is.
absl::Status AttachedChannel::ForgetOld() {
  while (true) {
    const absl::Status heard = socket_->Receive(absl::ZeroDuration()).status();
    if (absl::IsDeadlineExceeded(heard)) return absl::OkStatus();
    if (!heard.ok()) return AwaitNextIncarnation(heard);
  }
}

void AttachedChannel::Notify() { FutexBump(*reinterpret_cast<std::atomic<uint32_t>*>(notifier_.data())); }

// Into the mailbox, and wakes the lead. The message before it, of a call that was given up or of the slot's last
// trainer, may still lie there.
absl::Status AttachedChannel::PostMessage(const std::string& message) {
  if (message.size() > kMaxMessageBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a step's request of ", message.size(), " bytes; at most ",
                                                   kMaxMessageBytes, ": give one learning rate for each of the job's ",
                                                   job_->spec().num_groups(), " parameter groups, or one for all"));
  }
  TakeMessage(mailbox_->reply, bytes_);  // an answer to such a call would keep the next one back
  while (!PutMessage(mailbox_->request, message)) {
    Notify();
    AwaitChange(mailbox_->request.taken, mailbox_->request.taken.load(), job_->options().spin, kRetry);
    RETURN_IF_ERROR(HearOfMessage());
  }
  Notify();
  return absl::OkStatus();
}

// The answer to the message, from the mailbox; answers to calls that were given up are passed over, and this one's may
// wait for the room.
absl::StatusOr<v1::TrainerReply> AttachedChannel::AwaitAnswer(uint64_t id) {
  Message& message = mailbox_->reply;
  while (true) {
    const uint32_t seen = message.number.load();
    if (TakeMessage(message, bytes_)) {
      v1::TrainerReply reply;
      if (!reply.ParseFromString(bytes_)) return absl::InternalError("the worker sent a message that is no reply");
      if (reply.id() != id) {
        Notify();
        continue;
      }
      RETURN_IF_ERROR(StatusOf(reply));
      return reply;
    }
    AwaitChange(message.number, seen, job_->options().spin, std::min(kLook, silence_));
    if (message.number.load() == seen) RETURN_IF_ERROR(HearOfMessage());
  }
}

// Why there will be no answer; or OK.
absl::Status AttachedChannel::HearOfMessage() {
  ASSIGN_OR_RETURN(const std::optional<v1::TrainerReply> reply, Hear(absl::ZeroDuration()));
  return reply.has_value() && reply->id() == 0 ? StatusOf(*reply) : absl::OkStatus();
}

v1::SessionHello AttachedChannel::Hello() const {
  v1::SessionHello hello;
  hello.set_job(job_->spec().name);
  hello.set_epoch(job_->epoch().value());
  hello.set_session(welcome_.session());
  hello.mutable_slots()->Add(slots_.begin(), slots_.end());
  hello.set_needs_all(options_.needs_all);
  return hello;
}

// The connection broke. If a node has the worker's memory, its next incarnation goes on with this session: windows and
// messages are as they were.
absl::Status AttachedChannel::AwaitNextIncarnation(const absl::Status& cause) {
  if (!retained_) return Gone(cause);
  const absl::Duration left = std::max(wait_.deadline - MonotonicNow(), absl::ZeroDuration());
  absl::StatusOr<ResumedSession> resumed = ResumeSession(socket_path_, Hello(), std::min(silence_, left));
  if (absl::IsUnavailable(resumed.status()) && MonotonicNow() >= wait_.deadline) {
    return absl::DeadlineExceededError(absl::StrCat(wait_.late, "; the worker died, and is not back yet"));
  }
  if (!resumed.ok()) return Gone(resumed.status());
  MutexLock lock(mu_);
  if (left_) return Gone(absl::UnavailableError("this session was closed"));
  socket_ = std::move(resumed->socket);
  retained_ = resumed->welcome.retained();
  ++incarnations_;
  last_heard_ = MonotonicNow();
  return absl::OkStatus();
}

absl::Status AttachedChannel::CheckProcess() const {
  if (getpid() == pid_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this session of job ", job_->spec().name, " belongs to process ",
                                                    pid_, ", from which process ", getpid(),
                                                    " was forked; attach in this process"));
}

absl::Status AttachedChannel::Gone(const absl::Status& cause) const {
  return GoneOrStopped(*job_, rank_, cause.message());
}

}  // namespace shardmesh
