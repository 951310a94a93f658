#include "client/cpp/pulling_session.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/attached_pulling.h"
#include "client/cpp/connected_pulling.h"
#include "client/cpp/gradient_check.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

SlotResult FromProto(v1::SlotResult result) {
  if (result == v1::SLOT_RESULT_SAME) return SlotResult::kSame;
  return result == v1::SLOT_RESULT_DIFFERS ? SlotResult::kDiffers : SlotResult::kAccepted;
}

// Sessions of a process are spread over the workers that it can attach to.
int NextNumber() {
  static std::atomic<unsigned> next{0};
  return static_cast<int>(next.fetch_add(1) % 1024);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PullingSession>> PullingSession::Open(std::shared_ptr<Job> job, Way way) {
  if (!job->spec().pulled()) {
    const bool attached = way == Way::kAttached;
    return absl::FailedPreconditionError(absl::StrCat("slots of job ", job->spec().name, " are assigned: ",
                                                      attached ? "attach" : "connect", " to those that you compute"));
  }
  std::unique_ptr<PullingSession> session(new PullingSession(job));
  if (way == Way::kAttached) {
    ASSIGN_OR_RETURN(const Rank rank, RankToAttachTo(*job, NextNumber()));
    ASSIGN_OR_RETURN(session->channel_, AttachedPulling::Open(job, rank));
  } else {
    ASSIGN_OR_RETURN(session->channel_, ConnectedPulling::Open(job, Rank(NextNumber() % job->plan().num_ranks())));
  }
  session->committed_ = session->channel_->committed_step();
  const int buckets = static_cast<int>(job->plan().buckets().size());
  RETURN_IF_ERROR(session->uses_.Open(session->job_->spec(), buckets, session->channel_.get()));
  return session;
}

absl::Status PullingSession::AwaitWeights(absl::Duration timeout) {
  ASSIGN_OR_RETURN(committed_, channel_->AwaitWeights(timeout));
  return absl::OkStatus();
}

absl::Status PullingSession::CheckHasWeights() const {
  if (committed_.value() >= 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("no initial weights of job ", job_->spec().name,
                                                    " were seen yet; call AwaitWeights before the first slot"));
}

absl::Status PullingSession::CheckTaken() const {
  if (taken_.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("no slot of job ", job_->spec().name, " is taken; call Take"));
}

absl::StatusOr<TensorView> PullingSession::gradient(absl::string_view name) const {
  RETURN_IF_ERROR(CheckTaken());
  if (sent_.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("slot ", taken_->value(), " was finished, and the answer did not come: finish it again"));
  }
  return GradientView(*job_, name, channel_->window(window_));
}

absl::StatusOr<ConstTensorView> PullingSession::parameter(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  const Bucket& bucket = job_->plan().buckets()[job_->plan().placements()[tensor].bucket];
  return WeightsIn(job_->plan(), tensor, channel_->weights().data() + bucket.weight_offset);
}

absl::StatusOr<int> PullingSession::bucket(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  return job_->plan().placements()[tensor].bucket;
}

absl::Status PullingSession::CheckBucket(int bucket) const {
  RETURN_IF_ERROR(uses_.Check(bucket));
  return CheckHasWeights();
}

absl::Status PullingSession::Acquire(int bucket, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  return uses_.Acquire(bucket, timeout);
}

absl::Status PullingSession::Prefetch(int bucket) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  return uses_.Prefetch(bucket);
}

absl::Status PullingSession::Release(int bucket) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  return uses_.Release(bucket);
}

absl::Status PullingSession::Fill(const FinishOptions& options, v1::FinishedSlot& finished) const {
  RETURN_IF_ERROR(CheckTaken());
  if (sent_.has_value()) {  // the window may be the workers' by now: what was said of it is said again
    finished = *sent_;
    return absl::OkStatus();
  }
  finished.set_slot(taken_->value());
  finished.set_step(committed_.value() + 1);
  finished.set_tokens(options.tokens);
  finished.mutable_learning_rates()->Add(options.learning_rates.begin(), options.learning_rates.end());
  if (options.loss_scale != 1) finished.set_loss_scale(options.loss_scale);
  if (channel_->workers_look()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const SlotFindings found, LookAtSlot(job_->spec(), job_->plan(), channel_->window(window_), *taken_,
                                                        committed_.next(), options.tokens));
  finished.set_digest(found.digest);
  if (found.non_finite.has_value()) {
    finished.mutable_non_finite()->set_slot(taken_->value());
    finished.mutable_non_finite()->set_tensor(found.non_finite->first);
    finished.mutable_non_finite()->set_element(found.non_finite->second);
  }
  return absl::OkStatus();
}

absl::StatusOr<PullingSession::Next> PullingSession::Send(v1::TrainerRequest& message, absl::Duration timeout,
                                                          absl::string_view what) {
  v1::SlotRequest& request = *message.mutable_slot();
  request.set_after_step(committed_.value());
  request.set_timeout_ms(std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 1, kMaxSlotTimeoutMs));
  if (request.has_finished()) sent_ = request.finished();
  const absl::StatusOr<v1::TrainerReply> reply = channel_->Send(message, MonotonicNow() + timeout, timeout, what);
  const bool answered = !absl::IsDeadlineExceeded(reply.status()) && !absl::IsUnavailable(reply.status());
  if (answered && (request.has_finished() || reply.ok())) sent_.reset();
  if (request.has_finished() && (reply.ok() || absl::IsAborted(reply.status()))) taken_.reset();
  RETURN_IF_ERROR(reply.status());
  const v1::SlotReply& said = reply->slot();
  Next next;
  next.result = FromProto(said.result());
  if (!request.take()) return next;
  if (said.has_slot()) {
    const std::optional<int> window = channel_->WindowHere(said.window());
    if (!window.has_value()) {
      return absl::InternalError(absl::StrCat("the worker gave window ", said.window(), " of a trainer"));
    }
    window_ = *window;
    next.work.slot = taken_ = Slot(said.slot());
    next.work.step = Step(said.step());
    return next;
  }
  taken_.reset();
  committed_ = next.work.step = Step(said.committed().step());
  next.work.committed = said.committed();
  return next;
}

absl::StatusOr<PullingSession::Work> PullingSession::Take(absl::Duration timeout) {
  RETURN_IF_ERROR(CheckHasWeights());
  v1::TrainerRequest message;
  message.mutable_slot()->set_take(true);
  ASSIGN_OR_RETURN(
      Next next, Send(message, timeout,
                      absl::StrCat("no slot of step ", committed_.value() + 1, " was open, and it was not committed")));
  return std::move(next.work);
}

absl::StatusOr<SlotResult> PullingSession::Finish(const FinishOptions& options) {
  v1::TrainerRequest message;
  RETURN_IF_ERROR(Fill(options, *message.mutable_slot()->mutable_finished()));
  ASSIGN_OR_RETURN(const Next next,
                   Send(message, options.timeout, absl::StrCat("slot ", taken_->value(), " was not finished")));
  return next.result;
}

absl::StatusOr<PullingSession::Next> PullingSession::FinishAndTake(const FinishOptions& options) {
  v1::TrainerRequest message;
  RETURN_IF_ERROR(Fill(options, *message.mutable_slot()->mutable_finished()));
  message.mutable_slot()->set_take(true);
  return Send(message, options.timeout,
              absl::StrCat("slot ", taken_->value(), " was not finished, or no other was open"));
}

// What is written from here on is this process's own: the slots are somebody else's.
void PullingSession::Leave() {
  for (Segment& segment : channel_->gradients()) segment.MakePrivate().IgnoreError();
  channel_->Leave();
}

}  // namespace shardmesh
