#include "worker/doors/seat_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/job/gradient_run.h"
#include "local/memory/futex.h"
#include "local/memory/mailbox.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);  // at what else may have happened, while a message waits
constexpr absl::Duration kSlice = absl::Milliseconds(200);
constexpr absl::Duration kRetry = absl::Microseconds(100);

uint64_t RandomId() {
  uint64_t id = 0;
  while (id == 0) std::memcpy(&id, RandomSecret().data(), sizeof id);
  return id;
}

absl::Status Gone() { return absl::CancelledError("the trainer left its seat"); }

}  // namespace

SeatSession::SeatSession(std::shared_ptr<JobShard> shard, int seat, uint64_t holder)
    : shard_(std::move(shard)),
      seat_(seat),
      holder_(holder),
      id_(RandomId()),
      has_(shard_->plan().num_shards()),
      pushing_(shard_->plan().num_shards()) {}

void SeatSession::Ask(v1::SlotRequest message, absl::Time deadline, Done done) {
  std::optional<Request> before;
  bool ended;
  {
    MutexLock lock(mu_);
    ended = ended_;
    if (!ended) {
      before = std::exchange(next_, Request{std::move(message), deadline, std::move(done)});
      asked_.SignalAll();
    }
  }
  if (ended) return done(Gone());
  if (before.has_value()) before->done(absl::AbortedError("another request of this session came; repeat this one"));
}

absl::Status SeatSession::Run() {
  while (true) {
    std::optional<Request> request;
    {
      MutexLock lock(mu_);
      if (!ended_ && !next_.has_value()) asked_.WaitFor(mu_, kSlice);
      if (ended_) break;
      request = std::exchange(next_, std::nullopt);
    }
    if (request.has_value()) request->done(Serve(*request));
    if (const absl::Status open = shard_->CheckOpen(); !open.ok()) {
      End();
      return open;
    }
  }
  return absl::OkStatus();
}

void SeatSession::End() {
  std::optional<Request> open;
  {
    MutexLock lock(mu_);
    ended_ = true;
    open = std::exchange(next_, std::nullopt);
    asked_.SignalAll();
  }
  if (open.has_value()) open->done(Gone());
}

absl::StatusOr<v1::SlotReply> SeatSession::Serve(Request& request) {
  RETURN_IF_ERROR(shard_->Health());
  v1::SlotRequest& message = request.message;
  if (message.has_finished()) RETURN_IF_ERROR(Fill(*message.mutable_finished()));
  Answer answer = Send(message, request.deadline);
  NoteReply(message, answer);
  return std::move(answer.reply);
}

char* SeatSession::WindowOf(const Taken& taken) const {
  return shard_->host().slot(seat_).data() + taken.window * shard_->plan().gradient_window_bytes();
}

absl::Status SeatSession::Fill(v1::FinishedSlot& finished) {
  ASSIGN_OR_RETURN(const char* const window, Seal(finished));
  if (window == nullptr) {
    MutexLock lock(mu_);
    finished = finished_[finished.slot()];
    return absl::OkStatus();
  }
  const absl::StatusOr<SlotFindings> found = LookAtSlot(shard_->spec(), shard_->plan(), window, Slot(finished.slot()),
                                                        Step(finished.step()), finished.tokens());
  if (!found.ok()) {
    Open(finished.slot());
    return found.status();
  }
  finished.set_digest(found->digest);
  finished.clear_non_finite();
  if (found->non_finite.has_value()) {
    finished.mutable_non_finite()->set_slot(finished.slot());
    finished.mutable_non_finite()->set_tensor(found->non_finite->first);
    finished.mutable_non_finite()->set_element(found->non_finite->second);
  }
  MutexLock lock(mu_);
  if (finished_step_ != finished.step()) finished_.clear();
  finished_step_ = finished.step();
  finished_[finished.slot()] = finished;
  return absl::OkStatus();
}

// The slot's window; null: this was said before.
absl::StatusOr<const char*> SeatSession::Seal(const v1::FinishedSlot& finished) {
  MutexLock lock(mu_);
  if (finished_step_ == finished.step() && finished_.count(finished.slot()) > 0) return nullptr;
  const int64_t committed = shard_->protocol().committed_step().value();
  const std::string what = absl::StrCat("slot ", finished.slot(), " of step ", finished.step());
  if (finished.step() <= committed) {  // whose gradient shards were not needed
    return absl::AbortedError(absl::StrCat(what,
                                           " was taken back, and another trainer finished it; the last committed "
                                           "step is ",
                                           committed, ": take another slot"));
  }
  if (!taken_.has_value() || taken_->slot != finished.slot() || taken_->step != finished.step()) {
    return absl::FailedPreconditionError(absl::StrCat(what, " is not the one that this trainer took; take one first"));
  }
  const auto missing = std::find(has_.begin(), has_.end(), false);
  if (missing != has_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(what, " lacks the gradient of shard ", missing - has_.begin(),
                                                      "; push it first, with this session"));
  }
  sealed_ = true;
  return WindowOf(*taken_);
}

void SeatSession::Open(int slot) {
  MutexLock lock(mu_);
  sealed_ = false;
  finished_.erase(slot);
}

// As an attached trainer does (client/cpp/pulling_session.cc): on an error but Aborted the slot can be finished again.
void SeatSession::NoteReply(const v1::SlotRequest& message, const Answer& answer) {
  if (!answer.answered) return;
  const bool ok = answer.reply.ok();
  if (message.has_finished() && !ok && !absl::IsAborted(answer.reply.status())) return Open(message.finished().slot());
  MutexLock lock(mu_);
  const auto let_go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    taken_.reset();
    sealed_ = false;
    ++generation_;
    std::fill(has_.begin(), has_.end(), false);
  };
  const bool of_taken =
      taken_.has_value() && taken_->slot == message.finished().slot() && taken_->step == message.finished().step();
  if (message.has_finished() && of_taken) let_go();
  if (!ok || !message.take()) return;
  const v1::SlotReply& reply = *answer.reply;
  const bool same = reply.has_slot() && taken_.has_value() && taken_->slot == reply.slot() &&
                    taken_->step == reply.step() && taken_->window == reply.window();
  if (same) return;
  let_go();
  if (reply.has_slot()) taken_ = Taken{reply.slot(), reply.window(), reply.step()};
}

SeatSession::Answer SeatSession::Send(const v1::SlotRequest& message, absl::Time deadline) {
  v1::TrainerRequest request;
  *request.mutable_slot() = message;
  const int64_t left = absl::ToInt64Milliseconds(deadline - MonotonicNow());
  request.mutable_slot()->set_timeout_ms(std::clamp<int64_t>(left, 1, kMaxSlotTimeoutMs));
  request.set_session(holder_);
  request.set_id(holder_ << 32 | ++messages_);  // of no other session's message
  if (absl::Status posted = Post(request.SerializeAsString(), deadline); !posted.ok())
    return {false, std::move(posted)};
  return Await(request.id(), deadline);
}

// The message before it, of a request that was given up or of the seat's last trainer, may still lie there.
absl::Status SeatSession::Post(const std::string& bytes, absl::Time deadline) {
  Mailbox& box = shard_->host().mailbox(seat_);
  if (bytes.size() > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a request of ", bytes.size(), " bytes; at most ", kMaxMessageBytes));
  }
  TakeMessage(box.reply, bytes_);  // an answer to such a request would keep the next one back
  while (!PutMessage(box.request, bytes)) {
    FutexBump(shard_->protocol().notifier());
    AwaitChange(box.request.taken, box.request.taken.load(), absl::ZeroDuration(), kRetry);
    RETURN_IF_ERROR(CheckWaits(deadline));
  }
  FutexBump(shard_->protocol().notifier());
  return absl::OkStatus();
}

SeatSession::Answer SeatSession::Await(uint64_t id, absl::Time deadline) {
  Message& message = shard_->host().mailbox(seat_).reply;
  while (true) {
    const uint32_t seen = message.number.load();
    if (TakeMessage(message, bytes_)) {
      v1::TrainerReply reply;
      if (!reply.ParseFromString(bytes_)) return {false, absl::InternalError("the lead's answer cannot be parsed")};
      if (reply.id() != id) {  // to a request that was given up; this one's may wait for the room
        FutexBump(shard_->protocol().notifier());
        continue;
      }
      const absl::Status status(static_cast<absl::StatusCode>(reply.code()), reply.message());
      if (!status.ok()) return {true, status};
      return {true, reply.slot()};
    }
    AwaitChange(message.number, seen, absl::ZeroDuration(), kLook);
    if (message.number.load() != seen) continue;
    if (absl::Status waits = CheckWaits(deadline); !waits.ok()) return {false, std::move(waits)};
  }
}

absl::Status SeatSession::CheckWaits(absl::Time deadline) const {
  RETURN_IF_ERROR(shard_->Health());
  {
    MutexLock lock(mu_);
    if (ended_) return Gone();
    if (next_.has_value()) return absl::AbortedError("another request of this session came; repeat this one");
  }
  if (MonotonicNow() < deadline) return absl::OkStatus();
  const StepProtocol& protocol = shard_->protocol();
  const Step open = protocol.committed_step().next();
  return absl::DeadlineExceededError(absl::StrCat("no slot of step ", open.value(),
                                                  " was open in time, and it was not committed; ",
                                                  protocol.outcomes().WaitsFor(open)));
}

absl::StatusOr<SeatSession::Push> SeatSession::BeginPush(const v1::PushHeader& header) {
  RETURN_IF_ERROR(shard_->protocol().members().CheckEpoch(header.epoch()));
  MutexLock lock(mu_);
  if (ended_) return Gone();
  if (header.step() <= shard_->protocol().committed_step().value()) return Push{nullptr, true, 0};
  const bool taken = taken_.has_value() && taken_->slot == header.slot() && taken_->step == header.step();
  const bool finished = finished_step_ == header.step() && finished_.count(header.slot()) > 0;
  if (finished || (taken && sealed_)) return Push{};
  if (!taken) {
    return absl::FailedPreconditionError(absl::StrCat("slot ", header.slot(), " of step ", header.step(),
                                                      " is not the one that this trainer took; take one first"));
  }
  if (pushing_[header.shard()]) {
    return absl::AbortedError("another push of this gradient shard is under way; repeat when it has ended");
  }
  pushing_[header.shard()] = true;
  has_[header.shard()] = false;  // one that is pushed again, with other gradients maybe
  return Push{WindowOf(*taken_), false, generation_};
}

absl::Status SeatSession::Write(const Push& push, char* to, absl::string_view bytes) {
  MutexLock lock(mu_);
  if (ended_) return Gone();
  if (push.generation != generation_ || sealed_) {
    return absl::AbortedError("the slot was finished, or another one taken, while its gradients were pushed");
  }
  std::memcpy(to, bytes.data(), bytes.size());
  return absl::OkStatus();
}

void SeatSession::EndPush(const Push& push, int shard, bool complete) {
  MutexLock lock(mu_);
  pushing_[shard] = false;
  if (complete && push.generation == generation_) has_[shard] = true;
}

absl::Status SeatSessions::Enter() {
  if (calls_.fetch_add(1) < kMaxSeatCalls) return absl::OkStatus();
  calls_.fetch_sub(1);
  return absl::ResourceExhaustedError(
      absl::StrCat("this worker has ", kMaxSeatCalls, " calls of Seat open already; end one, or ask another member"));
}

void SeatSessions::Add(std::shared_ptr<SeatSession> session) {
  MutexLock lock(mu_);
  const uint64_t id = session->id();
  sessions_[id] = std::move(session);
}

void SeatSessions::Remove(const SeatSession& session) {
  MutexLock lock(mu_);
  sessions_.erase(session.id());
}

absl::StatusOr<std::shared_ptr<SeatSession>> SeatSessions::Find(uint64_t id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(id);
  if (found != sessions_.end()) return found->second;
  return absl::NotFoundError("this worker gave no seat of that session, or it was left; take a seat (Shard.Seat)");
}

}  // namespace shardmesh
