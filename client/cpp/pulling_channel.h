// PullingChannel: how a PullingSession talks with the workers: attached (attached_pulling.h: shared memory) or
// connected (connected_pulling.h: gRPC). One request either way (proto/shardmesh/v1/trainer.proto). For one thread, but
// Leave.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/used_buckets.h"
#include "core/base/ids.h"
#include "local/memory/segment.h"
#include "proto/shardmesh/v1/trainer.pb.h"

namespace shardmesh {

class PullingChannel : public BucketWindow {
 public:
  ~PullingChannel() override = default;

  // Where this trainer reads weights, and writes gradients: as many windows, one behind the other, as WindowHere tells
  // apart. Addresses stay as they are.
  const Segment& weights() const { return shown_.mapped() ? shown_ : weights_; }
  std::vector<Segment>& gradients() { return gradients_; }  // one
  const char* window(int window) const { return gradients_[0].data() + window * window_bytes_; }

  virtual Step committed_step() const = 0;  // when the channel was opened
  // Whether the workers look at the gradients of a slot that is finished (core/job/gradient_run.h); else the trainer
  // has to.
  virtual bool workers_look() const = 0;
  // The window that lies here for the one that the workers named. nullopt: none.
  virtual std::optional<int> WindowHere(int named) const = 0;

  // Waits until the job has weights and they can be read here: of which step. DeadlineExceeded: it has none yet.
  virtual absl::StatusOr<Step> AwaitWeights(absl::Duration timeout) = 0;
  // A request and its answer, until `deadline`, which is `timeout` from when the caller began to count. When it answers
  // with a slot, the weights here are those that the slot is computed with; with a step: of that step or a later one.
  // With bucket residency: those that are fetched.
  //   DeadlineExceeded: `what` says what did not happen. Unavailable: the worker is gone or silent. Others: the
  //   answer's.
  virtual absl::StatusOr<v1::TrainerReply> Send(v1::TrainerRequest& request, absl::Time deadline,
                                                absl::Duration timeout, absl::string_view what) = 0;

  virtual std::vector<v1::AwaitedTrainer> awaited() const { return {}; }  // as Session::awaited
  virtual void Leave() = 0;                                               // as Session::Leave

  absl::Status GuardWeights(int bucket, bool accessible) override;

 protected:
  explicit PullingChannel(std::shared_ptr<Job> job)
      : job_(std::move(job)), window_bytes_(job_->plan().gradient_window_bytes()) {}
  bool bucketed() const { return job_->plan().bucketed(); }
  bool guarded() const { return bucketed() && job_->options().guard_buckets; }

  const std::shared_ptr<Job> job_;
  const int64_t window_bytes_;
  Segment weights_;
  Segment shown_;  // where callers may write to weights: their own view of weights_
  std::vector<Segment> gradients_;
};

}  // namespace shardmesh
