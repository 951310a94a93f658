// RawTrainer: a job's pushes and steps call by call, as a client that is not ours would make them, with the gradients
// of training.h. Errors are the workers' own. Thread-safe.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"

namespace shardmesh::testing {

class RawTrainer {
 public:
  static absl::StatusOr<std::unique_ptr<RawTrainer>> Create(std::shared_ptr<Job> job);

  Job& job() const { return *job_; }
  v1::Shard::Stub& stub(Rank rank) { return *stubs_[rank.value()]; }
  // The replica of a shard that receives a slot's gradient shards.
  Rank Owner(int slot, int shard) const;

  v1::PushHeader Header(int slot, int64_t step, int shard) const;
  absl::StatusOr<v1::PushReply> Push(int slot, int64_t step, int shard);
  // As Push, but again while another push of the gradient shard is under way: a cancelled one ends a little later.
  absl::StatusOr<v1::PushReply> PushAgain(int slot, int64_t step, int shard);
  absl::Status PushAll(int64_t step);

  // With the learning rate of training.h.
  v1::StepRequest Request(const std::vector<int>& slots, int64_t step) const;
  absl::StatusOr<v1::StepReply> Step(int rank, const std::vector<int>& slots, int64_t step);
  // Every slot's gradients, and one step.
  absl::Status WholeStep(int64_t step);

 private:
  explicit RawTrainer(std::shared_ptr<Job> job) : job_(std::move(job)) {}

  const std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<v1::Shard::Stub>> stubs_;
};

}  // namespace shardmesh::testing
