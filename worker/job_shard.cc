#include "worker/job_shard.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "local/futex.h"

namespace shardmesh {

absl::StatusOr<std::unique_ptr<JobShard>> JobShard::Create(JobShardOptions options, Plan plan, HostMemory host,
                                                           Memory& memory, const std::atomic<bool>* cancelled) {
  const std::string name = absl::StrCat("shardmesh-", options.spec.name, "-shard-", options.rank.value());
  ASSIGN_OR_RETURN(ShardStorage storage,
                   ShardStorage::Open(memory, name, plan, plan.PlaceOf(options.rank).shard, cancelled));
  return std::unique_ptr<JobShard>(
      new JobShard(std::move(options), std::move(plan), std::move(host), std::move(storage)));
}

JobShard::JobShard(JobShardOptions options, Plan plan, HostMemory host, ShardStorage storage)
    : options_(std::move(options)),
      plan_(std::move(plan)),
      place_(plan_.PlaceOf(options_.rank)),
      host_(std::move(host)),
      storage_(std::move(storage)),
      protocol_(std::make_unique<StepProtocol>(host_.control(), &options_.spec, &plan_, options_.worker_names)),
      pass_(std::make_unique<Pass>(options_.spec, plan_, place_, host_, storage_, options_.threads, &trace_)),
      engine_(std::make_unique<Engine>(
          *protocol_, *pass_, options_.rank, options_.step_timeout, [this] { waiters_.Notify(); }, &trace_)) {}

JobShard::~JobShard() { engine_.reset(); }

void JobShard::Close() {
  closed_.store(true);
  waiters_.Notify();
}

absl::Status JobShard::Health() const {
  if (closed_.load())
    return absl::NotFoundError(absl::StrCat("job ", spec().name, " was deleted, or moved to other workers"));
  return protocol_->Health();
}

absl::Status JobShard::CheckEpoch(int64_t epoch) const {
  if (epoch == options_.epoch.value()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("epoch ", epoch, " of job ", spec().name, " is not the current one, ",
                                         options_.epoch.value(), "; open the job again"));
}

absl::StatusOr<std::optional<StepOutcome>> JobShard::Declare(const v1::StepRequest& request, bool attached) {
  RETURN_IF_ERROR(CheckEpoch(request.epoch()));
  Declaration declaration;
  declaration.step = Step(request.step());
  declaration.in_place = attached;
  declaration.learning_rates.assign(request.learning_rates().begin(), request.learning_rates().end());
  for (int slot : request.slots()) declaration.slots.push_back(Slot(slot));
  for (const v1::NonFinite& bad : request.non_finite())
    declaration.non_finite.emplace_back(Slot(bad.slot()), bad.tensor());
  for (Slot slot : declaration.slots) {
    ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, protocol_->CheckStep(slot, declaration.step));
    if (outcome.has_value()) return outcome;
    for (int shard = 0; shard < plan_.num_shards() && !attached; ++shard) {
      if (!protocol_->HasPiece(slot, shard, declaration.step)) {
        return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " of step ", request.step(),
                                                          " lacks the piece of shard ", shard, "; push it first"));
      }
    }
  }
  ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, protocol_->Declare(declaration));
  const int64_t now = MonotonicNanos();
  for (Slot slot : declaration.slots) trace_.Add({"declared", request.step(), -1, slot.value(), 0, now, now});
  return outcome;
}

v1::StepReply JobShard::ToReply(const StepOutcome& outcome) const {
  v1::StepReply reply;
  reply.set_step(outcome.step.value());
  reply.set_already_applied(outcome.already_applied);
  reply.set_skipped(outcome.skipped);
  reply.set_gradient_norm(outcome.norm);
  if (outcome.skipped) {
    const bool known = outcome.bad_tensor >= 0 && outcome.bad_tensor < static_cast<int>(spec().parameters.size());
    reply.set_skip_reason(absl::StrCat("slot ", outcome.bad_slot.value(), ": gradient of \"",
                                       known ? spec().parameters[outcome.bad_tensor].name : "?",
                                       "\" is not finite (NaN, infinite, or >= FLT_MAX / slots)"));
  }
  return reply;
}

bool JobShard::BeginPush(int slot) {
  if (slot >= 0) return protocol_->ClaimPush(Slot(slot), place_.shard, rank());
  MutexLock lock(mu_);
  return pushes_.insert(slot).second;
}

void JobShard::EndPush(int slot) {
  if (slot >= 0) return protocol_->ReleasePush(Slot(slot), place_.shard);
  MutexLock lock(mu_);
  pushes_.erase(slot);
}

void JobShard::Tick(int64_t now_nanos, absl::Duration heartbeat_timeout) {
  protocol_->SignOfLife(rank(), now_nanos, getpid());
  protocol_->CheckPeers(rank(), now_nanos, heartbeat_timeout);
  waiters_.Notify();
}

void JobShard::FillStatus(v1::GetStatusReply::Job& status) const {
  status.set_name(spec().name);
  status.set_epoch(epoch().value());
  status.set_rank(rank().value());
  status.set_committed_step(protocol_->committed_step().value());
  for (Step step : protocol_->Published()) status.add_published_steps(step.value());
  status.set_shard_bytes(storage_.num_bytes());
  status.set_window_bytes(host_.window().num_bytes());
  status.set_publication_bytes(host_.publication_bytes());
  status.set_slot_bytes(host_.slot_bytes());
  status.set_gathered_bytes(pass_->gathered_bytes());
  if (const absl::Status health = protocol_->Health(); !health.ok()) status.set_error(std::string(health.message()));
}

void JobShard::FillTrace(v1::GetTraceReply& trace) const {
  trace.set_rank(rank().value());
  trace.set_pid(getpid());
  for (const TraceSpan& span : trace_.Spans()) {
    v1::TraceSpan& to = *trace.add_spans();
    to.set_name(span.name);
    to.set_step(span.step);
    to.set_bucket(span.bucket);
    to.set_item(span.item);
    to.set_thread(span.thread);
    to.set_begin_nanos(span.begin_nanos);
    to.set_end_nanos(span.end_nanos);
  }
}

}  // namespace shardmesh
