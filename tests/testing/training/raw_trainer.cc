#include "tests/testing/training/raw_trainer.h"

#include "core/base/clock.h"
#include "core/base/status.h"
#include "rpc/channel.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {
namespace {
constexpr absl::Duration kTimeout = absl::Seconds(20);
}  // namespace

absl::StatusOr<std::unique_ptr<RawTrainer>> RawTrainer::Create(std::shared_ptr<Job> job) {
  std::unique_ptr<RawTrainer> trainer(new RawTrainer(std::move(job)));
  for (const v1::Member& member : trainer->job_->members()) {
    ASSIGN_OR_RETURN(const auto channel, NewChannel(member.address()));
    trainer->stubs_.push_back(v1::Shard::NewStub(channel));
  }
  return trainer;
}

Rank RawTrainer::Owner(int slot, int shard) const {
  return job_->plan().RankOf({shard, slot % job_->plan().num_replicas()});
}

v1::PushHeader RawTrainer::Header(int slot, int64_t step, int shard) const {
  v1::PushHeader header;
  header.set_job(job_->spec().name);
  header.set_epoch(job_->epoch().value());
  header.set_content(v1::PushHeader::CONTENT_GRADIENT);
  header.set_slot(slot);
  header.set_step(step);
  header.set_shard(shard);
  header.set_total_bytes(job_->plan().GradientShardBytes(shard));
  return header;
}

absl::StatusOr<v1::PushReply> RawTrainer::Push(int slot, int64_t step, int shard) {
  const std::string gradient_shard = GradientShard(*job_, Slot(slot), shardmesh::Step(step), shard);
  return job_->worker(Owner(slot, shard)).Push(Header(slot, step, shard), {gradient_shard}, kTimeout);
}

absl::StatusOr<v1::PushReply> RawTrainer::PushAgain(int slot, int64_t step, int shard) {
  const absl::Time deadline = MonotonicNow() + kTimeout;
  while (true) {
    absl::StatusOr<v1::PushReply> reply = Push(slot, step, shard);
    if (!absl::IsAborted(reply.status()) || MonotonicNow() > deadline) return reply;
    Pause(absl::Milliseconds(2));
  }
}

absl::Status RawTrainer::PushAll(int64_t step) {
  for (int slot = 0; slot < job_->spec().num_slots; ++slot) {
    for (int shard = 0; shard < job_->plan().num_shards(); ++shard) RETURN_IF_ERROR(PushAgain(slot, step, shard));
  }
  return absl::OkStatus();
}

v1::StepRequest RawTrainer::Request(const std::vector<int>& slots, int64_t step) const {
  v1::StepRequest request;
  request.set_job(job_->spec().name);
  request.set_epoch(job_->epoch().value());
  for (int slot : slots) request.add_slots(slot);
  request.set_step(step);
  for (double rate : LearningRates(job_->spec(), step)) request.add_learning_rates(rate);
  return request;
}

absl::StatusOr<v1::StepReply> RawTrainer::Step(int rank, const std::vector<int>& slots, int64_t step) {
  return job_->worker(Rank(rank)).Step(Request(slots, step), kTimeout);
}

absl::Status RawTrainer::WholeStep(int64_t step) {
  RETURN_IF_ERROR(PushAll(step));
  std::vector<int> slots;
  for (int slot = 0; slot < job_->spec().num_slots; ++slot) slots.push_back(slot);
  return Step(0, slots, step).status();
}

}  // namespace shardmesh::testing
