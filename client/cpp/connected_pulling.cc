#include "client/cpp/connected_pulling.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/copied_windows.h"
#include "client/cpp/next_incarnation.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/sync.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kAway = absl::Milliseconds(5);
constexpr absl::Duration kFrees = absl::Seconds(2);  // for a worker to see that a trainer is gone
// Until it is seen that a connection broke; of a worker that comes back, since then the call can go on.
constexpr absl::Duration kBreaks = absl::Milliseconds(100), kBreaksOfRetained = absl::Seconds(1);
// A worker whose packets get lost learns of a broken connection by its pings (ServerOptions::keepalive_time and _timeout),
// and counts the seat as taken until then.
constexpr absl::Duration kHeld = absl::Seconds(35);

// Jobs, by uid, of which this process lost a seat, until when a worker may hold it.
class LostSeats {
 public:
  static LostSeats& OfProcess() {
    static auto* const all = new LostSeats;  // for threads that run on while the process ends
    return *all;
  }
  void Add(int64_t job) {
    MutexLock lock(mu_);
    held_until_[job] = MonotonicNow() + kHeld;
  }
  bool Has(int64_t job) {
    MutexLock lock(mu_);
    const auto found = held_until_.find(job);
    if (found != held_until_.end() && found->second < MonotonicNow()) held_until_.erase(job);
    return held_until_.count(job) > 0;
  }

 private:
  Mutex mu_;
  std::map<int64_t, absl::Time> held_until_ ABSL_GUARDED_BY(mu_);
};
}  // namespace

absl::StatusOr<std::unique_ptr<PullingChannel>> ConnectedPulling::Open(std::shared_ptr<Job> job, Rank rank) {
  std::unique_ptr<ConnectedPulling> channel(new ConnectedPulling(std::move(job), rank));
  const Plan& plan = channel->job_->plan();
  const auto create = [](const char* name, int64_t bytes) {
    return Segment::Create(name, std::max(bytes, kSegmentPage), 0);
  };
  ASSIGN_OR_RETURN(channel->weights_, create("shardmesh-weights", plan.window_bytes()));
  if (channel->job_->options().writable_weights) {
    ASSIGN_OR_RETURN(channel->shown_, MapToDropWrites(channel->weights_));
  }
  if (channel->bucketed() && !channel->guarded()) channel->absent_.emplace(plan);
  for (size_t b = 0; channel->absent_.has_value() && b < plan.buckets().size(); ++b) {
    channel->absent_->Show(static_cast<int>(b), channel->weights_.data());
  }
  ASSIGN_OR_RETURN(Segment gradients, create("shardmesh-gradients", plan.gradient_window_bytes()));
  channel->gradients_.push_back(std::move(gradients));
  RETURN_IF_ERROR(CallAgain(*channel->job_, rank, channel->job_->peer_timeout(),
                            [&] { return channel->TakeSeat(channel->job_->options().opening_call()); }));
  return channel;
}

absl::Status ConnectedPulling::TakeSeat(absl::Duration timeout) {
  v1::SeatRequest request;
  request.set_job(job_->spec().name);
  request.set_epoch(job_->epoch().value());
  absl::StatusOr<std::unique_ptr<SeatTransport>> seat = job_->worker(rank_).Seat(request, timeout);
  if (absl::IsUnimplemented(seat.status())) {
    return absl::UnimplementedError(
        absl::StrCat(seat.status().message(),
                     ": this worker is of a build in which trainers that pull slots attach; "
                     "install one build on both, attach (Job::AttachPulling), or take assigned slots"));
  }
  if (absl::IsResourceExhausted(seat.status()) && LostSeats::OfProcess().Has(job_->uid())) {
    return absl::UnavailableError(absl::StrCat(
        seat.status().message(), "; one of them may be a seat that this process lost, which is free within ",
        absl::FormatDuration(kHeld), ": open the job again"));
  }
  RETURN_IF_ERROR(seat.status());
  std::shared_ptr<SeatTransport> next = *std::move(seat);
  opened_at_ = Step(next->reply().committed_step());
  MutexLock lock(mu_);
  if (left_) return absl::UnavailableError("this session was closed");
  seat_.swap(next);
  return absl::OkStatus();
}

// A worker whose memory is retained comes back, within the time after which it counts as gone: then the job is at a
// later epoch, or will be, on other workers.
absl::Status ConnectedPulling::TakeSeatAgain(absl::Time deadline) {
  const absl::Time until = std::min(deadline, MonotonicNow() + job_->peer_timeout());
  // It may have to free this trainer's old seat first.
  const auto of_call = [&] {
    return std::clamp(deadline - MonotonicNow(), kAway, std::max(until - MonotonicNow(), kFrees));
  };
  return CallAgain(*job_, rank_, until - MonotonicNow(), [&] { return TakeSeat(of_call()); });
}

void ConnectedPulling::Leave() {
  MutexLock lock(mu_);
  left_ = true;
  if (seat_ != nullptr) seat_->Leave();
}

bool ConnectedPulling::IsLost(const absl::Status& error) const {
  if (absl::IsNotFound(error)) return true;
  if (!absl::IsUnavailable(error)) return false;
  std::shared_ptr<SeatTransport> seat;
  {
    MutexLock lock(mu_);
    if (left_) return false;
    seat = seat_;
  }
  const bool over = seat->AwaitOver(job_->members()[rank_.value()].kept() ? kBreaksOfRetained : kBreaks);
  if (over) LostSeats::OfProcess().Add(job_->uid());
  return over;
}

absl::StatusOr<v1::TrainerReply> ConnectedPulling::Send(v1::TrainerRequest& request, absl::Time deadline,
                                                        absl::Duration timeout, absl::string_view what) {
  v1::TrainerRequest open = request;
  v1::SlotResult result = v1::SLOT_RESULT_UNSPECIFIED;
  while (true) {
    absl::StatusOr<v1::TrainerReply> reply = SendOnce(open, deadline);
    if (reply.ok()) {
      if (open.slot().has_finished()) result = reply->slot().result();
      open.mutable_slot()->clear_finished();  // it is known: what is sent again takes
      const absl::Status pulled = open.slot().take() ? PullFor(reply->slot(), deadline) : absl::OkStatus();
      if (absl::IsAborted(pulled) && MonotonicNow() < deadline) continue;
      reply->mutable_slot()->set_result(result);
      if (pulled.ok()) return reply;
      reply = pulled;
    }
    if (absl::IsDeadlineExceeded(reply.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat(what, " within ", absl::FormatDuration(timeout), "; ", reply.status().message()));
    }
    if (!IsLost(reply.status())) return reply;
    RETURN_IF_ERROR(TakeSeatAgain(deadline));
    if (!open.slot().has_finished()) continue;
    const v1::FinishedSlot& finished = open.slot().finished();
    return absl::AbortedError(absl::StrCat("slot ", finished.slot(), " of step ", finished.step(),
                                           " was taken back, since the connection broke; take another slot"));
  }
}

absl::StatusOr<v1::TrainerReply> ConnectedPulling::SendOnce(v1::TrainerRequest& request, absl::Time deadline) {
  uint64_t session;
  {
    MutexLock lock(mu_);
    if (left_) return absl::UnavailableError("this session was closed");
    session = seat_->reply().session();
  }
  if (request.slot().has_finished()) RETURN_IF_ERROR(Push(request.slot().finished(), session, deadline));
  request.set_session(session);
  return job_->worker(rank_).Trainer(request, deadline - MonotonicNow());
}

absl::Status ConnectedPulling::Push(const v1::FinishedSlot& finished, uint64_t session, absl::Time deadline) {
  v1::PushHeader header;
  header.set_job(job_->spec().name);
  header.set_epoch(job_->epoch().value());
  header.set_content(v1::PushHeader::CONTENT_GRADIENT);
  header.set_slot(finished.slot());
  header.set_step(finished.step());
  header.set_session(session);
  for (int shard = 0; shard < job_->plan().num_shards(); ++shard) {
    header.set_shard(shard);
    const std::vector<absl::string_view> parts = PartsOf(job_->plan(), window(0), shard);
    RETURN_IF_ERROR(job_->worker(rank_).Push(header, parts, deadline - MonotonicNow()).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<Step> ConnectedPulling::AwaitWeights(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + std::max(timeout, job_->options().call_timeout);
  ASSIGN_OR_RETURN(const Step committed, AwaitCommittedStep(*job_, rank_, timeout));
  RETURN_IF_ERROR(CallAgain(*job_, rank_, job_->peer_timeout(), [&] { return PullAny(committed, deadline); }));
  return weights_of_;
}

absl::Status ConnectedPulling::PullFor(const v1::SlotReply& reply, absl::Time deadline) {
  if (!reply.has_slot()) return PullAny(Step(reply.committed().step()), deadline);
  const Step wanted(reply.step() - 1);
  if (weights_of_ != wanted) RETURN_IF_ERROR(Pull(reply.slot(), wanted, deadline));
  if (weights_of_ == wanted) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("step ", reply.step(), " was committed without slot ", reply.slot()));
}

// For slots of the open step that nobody has finished: last ones first, which are open the longest. If all are finished
// the commit is a moment away.
absl::Status ConnectedPulling::PullAny(Step at_least, absl::Time deadline) {
  return PullUntil([&] { return weights_of_ >= at_least; }, at_least, deadline);
}

absl::Status ConnectedPulling::PullUntil(const std::function<bool()>& done, Step expected, absl::Time deadline) {
  while (!done()) {
    absl::Status status = absl::AbortedError("");
    for (int slot = job_->spec().num_slots - 1; slot >= 0 && absl::IsAborted(status); --slot) {
      status = Pull(slot, expected, deadline);
    }
    if (status.ok()) continue;
    if (!absl::IsAborted(status) || MonotonicNow() >= deadline) return status;
    RETURN_IF_ERROR(
        AwaitCommittedStep(*job_, rank_, absl::ZeroDuration()).status());  // another reason, such as an epoch
    Pause(kAway);
  }
  return absl::OkStatus();
}

absl::Status ConnectedPulling::Pull(int slot, Step expected, absl::Time deadline) {
  weights_of_ = Step(-1);  // until all is here
  if (bucketed()) return PullBuckets(slot, expected, deadline);
  ASSIGN_OR_RETURN(weights_of_, PullWeights(*job_, rank_, slot, std::nullopt, weights_.data(), deadline));
  return absl::OkStatus();
}

// `expected`: the step of which none is fetched.
absl::Status ConnectedPulling::PullBuckets(int slot, Step expected, absl::Time deadline) {
  std::optional<Step> of;
  for (const int bucket : used_) {
    ASSIGN_OR_RETURN(const Step step, PullWeights(*job_, rank_, slot, bucket, weights_.data(), deadline));
    if (of.value_or(step) != step) return absl::AbortedError("a step was committed while its weights were pulled");
    of = step;
  }
  weights_of_ = of.value_or(expected);
  return absl::OkStatus();
}

absl::Status ConnectedPulling::Fetch(int bucket, bool, absl::Duration timeout) {
  const int most = 1 + job_->plan().slots().prefetch_buckets;
  if (static_cast<int>(used_.size()) >= most) {
    return absl::ResourceExhaustedError(absl::StrCat("bucket ", bucket, " would be one more than the ", most,
                                                     " that a trainer of job ", job_->spec().name,
                                                     " may use; release one first"));
  }
  RETURN_IF_ERROR(GuardWeights(bucket, /*accessible=*/true));
  const absl::Time deadline = MonotonicNow() + timeout;
  const Step before = weights_of_;
  used_.insert(bucket);
  weights_of_ = Step(-1);
  const auto pull = [&]() -> absl::StatusOr<bool> {
    RETURN_IF_ERROR(PullUntil([&] { return weights_of_.value() >= 0; }, before, deadline));
    return true;
  };
  const absl::Status status = CallAgain(*job_, rank_, job_->peer_timeout(), pull).status();
  if (!status.ok()) used_.erase(bucket);
  return status;
}

absl::Status ConnectedPulling::Drop(int bucket) {
  used_.erase(bucket);
  const Plan& plan = job_->plan();
  RETURN_IF_ERROR(weights_.Punch(plan.buckets()[bucket].weight_offset, plan.WeightPageBytes(bucket)));
  if (absent_.has_value()) absent_->Show(bucket, weights_.data());
  return absl::OkStatus();
}

}  // namespace shardmesh
