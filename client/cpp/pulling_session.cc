#include "client/cpp/pulling_session.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/await_weights.h"
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

absl::StatusOr<std::unique_ptr<PullingSession>> PullingSession::Open(std::shared_ptr<Job> job) {
  if (!job->spec().pulled()) {
    return absl::FailedPreconditionError(
        absl::StrCat("slots of job ", job->spec().name, " are assigned: attach to those that you compute"));
  }
  ASSIGN_OR_RETURN(const Rank rank, RankToAttachTo(*job, NextNumber()));
  std::unique_ptr<PullingSession> session(new PullingSession(job, rank));
  ASSIGN_OR_RETURN(session->channel_, AttachedChannel::Open(job, rank, {}, AttachOptions{}));
  const Plan& plan = job->plan();
  RETURN_IF_ERROR(session->channel_->Map(session->channel_->TakeDescriptors(), plan.window_bytes(),
                                         plan.windows_each() * plan.gradient_window_bytes(), session->parameters_,
                                         session->seat_));
  session->committed_ = Step(session->channel_->welcome().committed_step());
  for (size_t t = 0; t < job->spec().parameters.size(); ++t) {
    const ParameterSpec& parameter = job->spec().parameters[t];
    if (parameter.tied_to.empty() && !parameter.frozen) session->tensors_.push_back(static_cast<int>(t));
  }
  return session;
}

absl::Status PullingSession::AwaitWeights(absl::Duration timeout) {
  ASSIGN_OR_RETURN(committed_, AwaitCommittedStep(*job_, rank_, timeout));
  return absl::OkStatus();
}

const char* PullingSession::window() const { return seat_[0].data() + window_ * job_->plan().gradient_window_bytes(); }

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
  return GradientView(*job_, name, window());
}

absl::StatusOr<ConstTensorView> PullingSession::parameter(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  const Bucket& bucket = job_->plan().buckets()[job_->plan().placements()[tensor].bucket];
  return WeightsIn(job_->plan(), tensor, parameters_.data() + bucket.weight_offset);
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
  uint64_t digest = 0;
  for (const int t : tensors_) {
    const GradientRun run = GradientIn(*job_, t, window());
    digest += DigestOf(run, t);
    int64_t element = 0;
    if (job_->spec().token_weights && options.tokens == 0 && !IsZero(run)) {
      return absl::InvalidArgumentError(absl::StrCat("slot ", taken_->value(), " has no tokens, and the gradient of \"",
                                                     job_->spec().parameters[t].name,
                                                     "\" is not zero; write zeros, or say how many tokens it has"));
    }
    if (finished.has_non_finite() || IsFinite(run, job_->spec(), &element)) continue;
    if (job_->spec().non_finite == NonFinitePolicy::kFail) {
      return NotFinite(*job_, *taken_, committed_.next(), t, element, "finish the slot");
    }
    finished.mutable_non_finite()->set_slot(taken_->value());
    finished.mutable_non_finite()->set_tensor(t);
    finished.mutable_non_finite()->set_element(element);
  }
  finished.set_digest(digest);
  return absl::OkStatus();
}

absl::StatusOr<PullingSession::Next> PullingSession::Send(v1::LocalRequest& message, absl::Duration timeout,
                                                          absl::string_view what) {
  v1::SlotRequest& request = *message.mutable_slot();
  request.set_after_step(committed_.value());
  request.set_timeout_ms(std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 1, kMaxSlotTimeoutMs));
  if (request.has_finished()) sent_ = request.finished();
  const absl::StatusOr<v1::LocalReply> reply = channel_->Send(message, MonotonicNow() + timeout, timeout, what);
  const bool answered = !absl::IsDeadlineExceeded(reply.status()) && !absl::IsUnavailable(reply.status());
  if (answered && (request.has_finished() || reply.ok())) sent_.reset();
  if (request.has_finished() && (reply.ok() || absl::IsAborted(reply.status()))) taken_.reset();
  RETURN_IF_ERROR(reply.status());
  const v1::SlotReply& said = reply->slot();
  Next next;
  next.result = FromProto(said.result());
  if (!request.take()) return next;
  if (said.has_slot()) {
    if (said.window() < 0 || said.window() >= job_->plan().windows_each()) {
      return absl::InternalError(absl::StrCat("the worker gave window ", said.window(), " of a trainer"));
    }
    window_ = said.window();
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
  if (committed_.value() < 0) {
    return absl::FailedPreconditionError(absl::StrCat("no initial weights of job ", job_->spec().name,
                                                      " were seen yet; call AwaitWeights before the first slot"));
  }
  v1::LocalRequest message;
  message.mutable_slot()->set_take(true);
  ASSIGN_OR_RETURN(
      Next next, Send(message, timeout,
                      absl::StrCat("no slot of step ", committed_.value() + 1, " was open, and it was not committed")));
  return std::move(next.work);
}

absl::StatusOr<SlotResult> PullingSession::Finish(const FinishOptions& options) {
  v1::LocalRequest message;
  RETURN_IF_ERROR(Fill(options, *message.mutable_slot()->mutable_finished()));
  ASSIGN_OR_RETURN(const Next next,
                   Send(message, options.timeout, absl::StrCat("slot ", taken_->value(), " was not finished")));
  return next.result;
}

absl::StatusOr<PullingSession::Next> PullingSession::FinishAndTake(const FinishOptions& options) {
  v1::LocalRequest message;
  RETURN_IF_ERROR(Fill(options, *message.mutable_slot()->mutable_finished()));
  message.mutable_slot()->set_take(true);
  return Send(message, options.timeout,
              absl::StrCat("slot ", taken_->value(), " was not finished, or no other was open"));
}

// What is written from here on is this process's own: the slots are somebody else's.
void PullingSession::Leave() {
  for (Segment& segment : seat_) segment.MakePrivate().IgnoreError();
  channel_->Leave();
}

}  // namespace shardmesh
