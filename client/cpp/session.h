// Session: a trainer's part in a job: gradient windows for its slots, the weights, and Step.
//
// Two kinds, one interface, the same bits: attached (shared memory: gradients are written in place, weights are read
// where the workers wrote them; nothing is copied) and connected (gRPC: the session has its own copy, Step pushes and
// pulls). A parameter view is valid while no Step runs: its bytes change during Step and never otherwise. Gradient
// windows are zero at first and keep what is written. For one thread. Closing a session frees its slots.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace shardmesh {

struct StepOptions {
  // The same from every slot of a step: one for all parameter groups, or one for each; empty: the job's.
  std::vector<double> learning_rates;
  absl::Duration timeout = absl::Seconds(60);
};

class Session {
 public:
  virtual ~Session() = default;

  // Views of one tensor, by this client's name. NotFound: no such parameter. InvalidArgument: a slot of another
  // session, or the gradient of a frozen parameter.
  absl::StatusOr<TensorView> gradient(Slot slot, absl::string_view name) const;
  absl::StatusOr<ConstTensorView> parameter(absl::string_view name) const;

  // Waits until the job has its initial weights and they can be read here. DeadlineExceeded: it has none yet.
  virtual absl::Status AwaitWeights(absl::Duration timeout) = 0;

  // Declares all slots of this session complete for step committed_step() + 1, and returns when it is committed:
  // parameter views hold the new weights. Errors: of Shard.Step; Unavailable names the worker that is gone. After an
  // error the gradients are as they were, and the call can be repeated: a step is never applied twice.
  virtual absl::StatusOr<v1::StepReply> Step(const StepOptions& options) = 0;
  absl::StatusOr<v1::StepReply> Step() { return Step(StepOptions{}); }

  shardmesh::Step committed_step() const { return committed_; }
  const Job& job() const { return *job_; }
  const std::vector<Slot>& slots() const { return slots_; }

 protected:
  Session(std::shared_ptr<Job> job, std::vector<Slot> slots) : job_(std::move(job)), slots_(std::move(slots)) {}
  virtual char* gradient_window(int slot_index) const = 0;
  virtual const char* parameter_window() const = 0;
  absl::Status CheckHasWeights() const;  // FailedPrecondition: AwaitWeights was not called, or failed
  v1::StepRequest NewStepRequest(const StepOptions& options) const;

  const std::shared_ptr<Job> job_;
  const std::vector<Slot> slots_;
  shardmesh::Step committed_{-1};
};

absl::StatusOr<std::unique_ptr<Session>> AttachSession(std::shared_ptr<Job> job, std::vector<Slot> slots);
absl::StatusOr<std::unique_ptr<Session>> ConnectSession(std::shared_ptr<Job> job, std::vector<Slot> slots);

// InvalidArgument: no slot, one twice, or one that the job has not.
absl::Status CheckSlots(const Job& job, const std::vector<Slot>& slots);

}  // namespace shardmesh
