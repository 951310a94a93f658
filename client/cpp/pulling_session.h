// PullingSession: a trainer's part in a job whose slots are pulled (JobSpec::slot_mode): it takes the next open slot,
// writes the slot's gradients and finishes it, as often as there is one. No trainer waits for another, but at the end
// of a step for its last slots. Which trainer does which slot changes no bit, as long as gradients are a function of
// slot, step and weights.
//
//   ASSIGN_OR_RETURN(auto session, job->AttachPulling());
//   RETURN_IF_ERROR(session->AwaitWeights(timeout));
//   while (...) {
//     ASSIGN_OR_RETURN(PullingSession::Work work, session->Take(timeout));
//     if (!work.slot.has_value()) continue;          // a step was committed: work.committed says how it went
//     ... read session->parameter(name), write session->gradient(name), of work.slot and work.step ...
//     RETURN_IF_ERROR(session->Finish(options).status());
//   }
//
// Attached, windows are shared memory: two gradient windows take turns, so the address of a gradient is one of two.
// Connected (through gRPC, from anywhere), they are this process's own memory: Finish pushes the gradients, and Take
// pulls the weights, once a step. The same bits, and both kinds may be in one job. For one thread. A trainer that ends,
// or does not finish a slot within JobSpec::slot_timeout_ms, gives it to others.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/pulling_channel.h"
#include "client/cpp/used_buckets.h"

namespace shardmesh {

struct FinishOptions {
  // As StepOptions: the same from every slot of a step.
  std::vector<double> learning_rates;
  double loss_scale = 1;
  int64_t tokens = 0;  // of a job with token weights: that the gradients are the sum over; 0: none, they are zeros
  absl::Duration timeout = absl::Seconds(60);
};

enum class SlotResult {
  kAccepted,  // it counts
  kSame,      // another trainer's, taken over when this one was late, came first, and is the same
  kDiffers    // it came first, and has other bits: trainers are not deterministic
};

class PullingSession {
 public:
  struct Work {
    std::optional<Slot> slot;  // to be written for `step`; weights are those of the step before
    Step step;                 // of the slot, or that was committed
    v1::StepReply committed;   // without a slot: how the newest step went that this trainer had not been told of
  };

  enum class Way { kAttached, kConnected };
  // Errors of Job::Attach. ResourceExhausted: the job has all its trainers. FailedPrecondition: slots are assigned.
  // Unimplemented: connected, and the worker is of a build that has no seats for it.
  static absl::StatusOr<std::unique_ptr<PullingSession>> Open(std::shared_ptr<Job> job, Way way);

  // Waits until the job has its initial weights. DeadlineExceeded: it has none yet.
  absl::Status AwaitWeights(absl::Duration timeout);

  // Waits for a slot, or for the commit of the step whose slots are all taken; a slot may come open again. Taken twice,
  // the slot is the same. DeadlineExceeded: neither; says what the step waits for. Unavailable: a worker is gone.
  absl::StatusOr<Work> Take(absl::Duration timeout);
  // Finishes the slot that was taken last. On an error but Aborted it can be finished again: safe, however often. After
  // DeadlineExceeded and Unavailable it may count already, and its gradients be the workers': they cannot be written
  // any more, and what was said is said again.
  //   Aborted: it was taken back, which also a broken connection does: take another. InvalidArgument: settings, tokens,
  //   gradients that are not zero of a slot without tokens, or, under policy fail, one that is not finite.
  //   FailedPrecondition: no slot was taken.
  absl::StatusOr<SlotResult> Finish(const FinishOptions& options);
  // Both at once, for one round trip to the workers: the result, and the next work.
  struct Next {
    SlotResult result = SlotResult::kAccepted;
    Work work;
  };
  absl::StatusOr<Next> FinishAndTake(const FinishOptions& options);

  // Views of one tensor, by this client's name: of the gradients of the slot that was taken, which hold what was
  // written there before, until Finish; and of the weights, whose bytes change when a step commits, and never between
  // Take and Finish. NotFound: no such parameter. InvalidArgument: it is frozen. FailedPrecondition: no slot was taken.
  absl::StatusOr<TensorView> gradient(absl::string_view name) const;
  absl::StatusOr<ConstTensorView> parameter(absl::string_view name) const;

  // In a job with bucket residency weights are there bucket by bucket: a parameter view is valid while its bucket is
  // acquired, and has the new weights after a commit. As Session's calls of these names, and with full residency the same
  // nothing. Gradients are of whole slots in any case: nothing is declared by bucket.
  absl::StatusOr<int> bucket(absl::string_view name) const;
  absl::Status Acquire(int bucket, absl::Duration timeout);
  absl::Status Prefetch(int bucket);
  absl::Status Release(int bucket);

  absl::Status ForgetWrites() const { return channel_->weights().ForgetWrites(); }  // as Session::ForgetWrites

  // As Session::awaited, of slots that other trainers have taken. Connected: empty.
  std::vector<v1::AwaitedTrainer> awaited() const { return channel_->awaited(); }
  void Leave();  // as Session::Leave

  Step committed_step() const { return committed_; }
  const Job& job() const { return *job_; }

 private:
  explicit PullingSession(std::shared_ptr<Job> job) : job_(std::move(job)) {}
  absl::Status Fill(const FinishOptions& options, v1::FinishedSlot& finished) const;
  absl::StatusOr<Next> Send(v1::TrainerRequest& message, absl::Duration timeout, absl::string_view what);
  absl::Status CheckTaken() const;
  absl::Status CheckBucket(int bucket) const;
  absl::Status CheckHasWeights() const;

  const std::shared_ptr<Job> job_;
  std::unique_ptr<PullingChannel> channel_;
  UsedBuckets uses_;
  Step committed_{-1};
  std::optional<Slot> taken_;
  std::optional<v1::FinishedSlot> sent_;  // of it, to which no answer came
  int window_ = 0;
};

}  // namespace shardmesh
