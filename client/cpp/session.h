// Session: a trainer's part in a job: gradient windows for its slots, the weights, and Step.
//
// There are two kinds with one interface and the same bits. An attached session shares memory with the workers: the
// trainer writes gradients in place and reads weights where the workers wrote them. A connected session (gRPC) has a
// copy of its own, which Step pushes and pulls.
//
// A parameter view is valid while no Step runs: its bytes change during Step and never otherwise. Gradient windows are
// zero at first and keep what is written. A session is for one thread. Closing it frees its slots.
//
// In a job with bucket residency (JobSpec::residency) neither window is there as a whole. A parameter view is valid
// while its bucket is acquired; if it stays acquired over a Step, it then has the new weights. A gradient view is the
// trainer's until its bucket is declared, and again after the Step, with nothing retained. Addresses stay the same.
// With full residency these calls check their arguments and do nothing, so one program trains with both:
//
//   session->Prefetch(next); ... read parameters of `current` ...; session->Release(current);   // forward
//   ... write gradients of `current` ...; session->DeclareBucket(current, timeout);              // backward, any order
//   session->Step();                                                                             // declares the rest
//
// If the workers run on a CUDA device, an attached session has windows in that device's memory. Views name the device;
// their addresses are for kernels and copies of this process, which must be done before Step (synchronize the streams).
// Step copies the gradients to the host once, to find those that are not finite.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/session_device.h"
#include "client/cpp/used_buckets.h"
#include "local/memory/segment.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

struct StepOptions {
  // The same from every slot of a step: one for all parameter groups, or one for each; empty: the job's.
  std::vector<double> learning_rates;
  // What gradients were multiplied by; the same from every slot. A power of two changes no bit of the step unless a
  // gradient overflows (it is skipped then, and the reply says so) or is lost below the smallest number.
  double loss_scale = 1;
  // Of a job with token weights: of each slot of the session, in their order. A slot without tokens has gradients of
  // zero.
  std::vector<int64_t> tokens;
  absl::Duration timeout = absl::Seconds(60);
};

class Session : protected BucketWindow {
 public:
  ~Session() override = default;

  // Views of one tensor, by this client's name. NotFound: no such parameter. InvalidArgument: a slot of another
  // session, or the gradient of a frozen parameter.
  absl::StatusOr<TensorView> gradient(Slot slot, absl::string_view name) const;
  absl::StatusOr<ConstTensorView> parameter(absl::string_view name) const;

  // Copies a gradient to where gradient() is, in its format; with bucket residency, where pages are given back after each
  // step, in less time than writing there takes. As gradient(); InvalidArgument: another number of bytes.
  // Unimplemented: the windows are a device's.
  absl::Status WriteGradient(Slot slot, absl::string_view name, absl::string_view bytes) const;

  // The bucket that a parameter lies in. NotFound: no such parameter.
  absl::StatusOr<int> bucket(absl::string_view name) const;

  // Adds a use of a bucket, and returns when its weights, of committed_step(), can be read. A session may use 1 +
  // prefetch_buckets buckets at a time, each as often as it wants.
  //   InvalidArgument: no such bucket. FailedPrecondition: no weights yet. ResourceExhausted: too many buckets; names
  //   them. DeadlineExceeded: it was not gathered in time, and is not in use. Unavailable: as Step.
  absl::Status Acquire(int bucket, absl::Duration timeout);
  // The same without waiting: an Acquire follows, which takes this use over. A connected session reserves nothing.
  absl::Status Prefetch(int bucket);
  // Takes a use back. FailedPrecondition: there is none.
  absl::Status Release(int bucket);
  // Declares that a bucket's gradients of all slots of this session are complete for step committed_step() + 1, and
  // returns when another bucket may be written: when at most prefetch_buckets of these slots wait for other slots.
  // Declared again, it is as it was.
  //   InvalidArgument: no such bucket, a frozen one, or a gradient that is not finite under policy fail; it is not
  //   declared. DeadlineExceeded: it is declared, but other slots are behind; the message names them. Repeat, or go on.
  absl::Status DeclareBucket(int bucket, absl::Duration timeout);

  // Drops what this process wrote to the weights. Views stay valid. FailedPrecondition: ClientOptions::writable_weights
  // is not set.
  absl::Status ForgetWrites() const;

  // Waits until the job has its initial weights and they can be read here. DeadlineExceeded: it has none yet.
  virtual absl::Status AwaitWeights(absl::Duration timeout) = 0;

  // Declares all slots of this session complete for step committed_step() + 1, and returns when it is committed:
  // parameter views hold the new weights. Errors: of Shard.Step; Unavailable names the worker that is gone. After an
  // error the gradients are as they were, and the call can be repeated: a step is never applied twice.
  virtual absl::StatusOr<v1::StepReply> Step(const StepOptions& options) = 0;
  absl::StatusOr<v1::StepReply> Step() { return Step(StepOptions{}); }

  // The trainers of the slots that the last call to the workers waited for, as its worker saw them last. Empty: it did
  // not wait, or this is a connected session, which is not told.
  virtual std::vector<v1::AwaitedTrainer> awaited() const { return {}; }

  // Leaves the job before the object goes: other trainers' calls learn of it at once, and views stay valid. A connected
  // session has nothing to leave. For any thread, also during a call of another one, which then ends with Unavailable.
  // Later calls, too.
  virtual void Leave() {}

  shardmesh::Step committed_step() const { return committed_; }
  const Job& job() const { return *job_; }
  const std::vector<Slot>& slots() const { return slots_; }

 protected:
  Session(std::shared_ptr<Job> job, std::vector<Slot> slots) : job_(std::move(job)), slots_(std::move(slots)) {}

  // What the kinds of sessions do about a bucket, beside what BucketWindow says. Of one that was `declared` before it only
  // waits; on DeadlineExceeded it is declared.
  virtual absl::Status SendBucket(v1::DeclareBucketRequest& request, bool declared, absl::Duration timeout) = 0;

  bool bucketed() const { return job_->plan().bucketed(); }
  bool guarded() const { return bucketed() && job_->options().guard_buckets; }
  bool InUse(int bucket) const { return uses_.InUse(bucket); }
  absl::Status OpenBuckets();                     // when the windows are mapped
  absl::Status DeclareRest(absl::Time deadline);  // what Step has to declare
  absl::Status BeginNextStep(shardmesh::Step committed);
  absl::Status GuardWeights(int bucket, bool accessible) override;
  absl::StatusOr<size_t> IndexOf(Slot slot) const;  // among slots()
  absl::Status CheckHasWeights() const;  // FailedPrecondition: AwaitWeights was not called, or failed
  v1::StepRequest NewStepRequest(const StepOptions& options) const;

  const std::shared_ptr<Job> job_;
  const std::vector<Slot> slots_;
  shardmesh::Step committed_{-1};
  Segment parameters_;                     // the parameter window
  Segment shown_;                          // where callers may write to weights: their own view of parameters_
  std::vector<Segment> gradients_;         // by slot
  std::unique_ptr<SessionDevice> device_;  // of a job on a device: where these are instead
  const Segment& weights() const { return shown_.mapped() ? shown_ : parameters_; }
  const char* window() const { return device_ != nullptr ? device_->parameters() : weights().data(); }
  // From now on views of the weights are of MapToDropWrites(parameters_).
  absl::Status ShowPrivately();
  char* gradient_window(size_t slot) const {
    return device_ != nullptr ? device_->gradients(slot) : gradients_[slot].data();
  }

 private:
  absl::Status CheckBucket(int bucket) const;
  absl::Status GuardGradients(int bucket, bool accessible);

  UsedBuckets uses_;
  std::vector<bool> declared_;  // by bucket
};

absl::StatusOr<std::unique_ptr<Session>> AttachSession(std::shared_ptr<Job> job, std::vector<Slot> slots,
                                                       AttachOptions options);
absl::StatusOr<std::unique_ptr<Session>> ConnectSession(std::shared_ptr<Job> job, std::vector<Slot> slots);

// InvalidArgument: no slot, one twice, or one that the job has not.
absl::Status CheckSlots(const Job& job, const std::vector<Slot>& slots);

}  // namespace shardmesh
