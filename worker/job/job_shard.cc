#include "worker/job/job_shard.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/memory/file_hold.h"
#include "local/memory/futex.h"
#include "worker/pass/thread_team.h"

namespace shardmesh {
namespace {
constexpr int kPublicationsInUse = 2;  // of a job without slow readers
}  // namespace

absl::StatusOr<std::unique_ptr<JobShard>> JobShard::Create(JobShardOptions options, Plan plan, HostMemory host,
                                                           Memory& memory, const std::atomic<bool>* cancelled) {
  std::unique_ptr<JobShard> shard(new JobShard(std::move(options), std::move(plan), std::move(host)));
  RETURN_IF_ERROR(shard->Open(memory, cancelled));
  return shard;
}

JobShard::JobShard(JobShardOptions options, Plan plan, HostMemory host)
    : options_(std::move(options)),
      plan_(std::move(plan)),
      place_(plan_.PlaceOf(options_.rank)),
      host_(std::move(host)),
      protocol_(std::make_unique<StepProtocol>(host_.control(), &host_.notifier(), &options_.spec, &plan_,
                                               options_.worker_names, options_.ranks, options_.rank)),
      requests_(*protocol_, plan_, options_.epoch, trace_),
      mail_(host_, *protocol_, options_.spec.num_writers(), requests_) {
  const auto mapped = [this](int buffer) { return IsFileHeld(host_.publication(buffer).fd()); };
  const auto mapped_at = [this](int b, int seat) { return IsFileHeldAt(host_.publication(b).fd(), seat); };
  protocol_->publications().ShowOn(&host_.board(), mapped);
  protocol_->publications().NamePullsBy([this](int buffer) {
    std::vector<std::string> pullers;
    for (const PullsUnderWay::Pull& pull : pulls_.List()) {
      if (pull.buffer == buffer) pullers.push_back(pull.puller);
    }
    return pullers;
  });
  leases_ = std::make_unique<VersionLeases>(host_.control(), &protocol_->publications(), &options_.spec, options_.rank,
                                            mapped_at);
}

absl::Status JobShard::Open(Memory& memory, const std::atomic<bool>* cancelled) {
  RETURN_IF_ERROR(OpenPass(memory, cancelled));
  if (options_.resumed) {
    protocol_->TakeOver();
    leases_->TakeOver();
    unclaimed_.Expect(protocol_->slots().Sessions().staying);
    if (rank().value() == protocol_->local().first()) mail_.TakeOver();
  } else if (plan_.bucketed() && rank().value() == protocol_->local().first()) {
    const int buckets = static_cast<int>(plan_.buckets().size());
    for (int b = 0; b < buckets; ++b) RETURN_IF_ERROR(pass_->GiveBackWeights(b));
  }
  engine_ = std::make_unique<Engine>(*protocol_, *pass_, options_.rank, ForEngine());
  return absl::OkStatus();
}

absl::Status JobShard::OpenPass(Memory& memory, const std::atomic<bool>* cancelled) {
  if (options_.device != nullptr) {
    const ReplicaShare share = ShareOf(plan_, protocol_->local(), options_.rank);
    DevicePassOptions options;
    options.timeout = options_.step_timeout;
    options.cancelled = cancelled;
    ASSIGN_OR_RETURN(pass_, DevicePass::Create(options_.spec, plan_, place_, host_, *options_.device, share, options));
    return absl::OkStatus();
  }
  const std::string name = absl::StrCat("shardmesh-", options_.spec.name, "-shard-", options_.rank.value());
  ASSIGN_OR_RETURN(storage_, ShardStorage::Open(memory, name, plan_, place_.shard, cancelled));
  ASSIGN_OR_RETURN(sums_, GradientSums::Open(memory, absl::StrCat(name, "-sums"), plan_, place_.shard));
  auto pass = std::make_unique<Pass>(options_.spec, plan_, place_, host_, *storage_, options_.threads, &trace_,
                                     GradientSums::Has(plan_) ? &*sums_ : nullptr, protocol_->local());
  // A trainer that takes a slot waits for no sum.
  if (rank() == Rank(0) && plan_.pulled() && protocol_->local().alone()) pass->WhileMerging([this] { mail_.Poll(); });
  pass->TakeSnapshots(&snapshots_);
  pass_ = std::move(pass);
  return absl::OkStatus();
}

EngineOptions JobShard::ForEngine() {
  EngineOptions options;
  options.step_timeout = options_.step_timeout;
  options.spin = options_.spin;
  if (rank() == Rank(0) && protocol_->local().alone()) {
    lead_.emplace(*protocol_, *pass_, options_.spec, plan_, LeadOptions{options_.step_timeout, &mail_, {}});
    options.lead = &lead_->lead;
  }
  options.progress = [this] {
    moved_nanos_.store(MonotonicNanos());
    waiters_.Notify();
  };
  options.trace = &trace_;
  return options;
}

JobShard::~JobShard() {
  // Members of this host may wait for gradient shards that will not come.
  if (host_lead_ != nullptr) protocol_->members().Abort(AbortReason::kLeft, rank().value(), rank());
  host_lead_.reset();
  engine_.reset();
}

void JobShard::StartHosts(HostGroups groups, absl::Duration heartbeat_timeout) {
  host_lead_ = std::make_unique<HostLead>(
      *protocol_, host_, *pass_, options_.spec, plan_, std::move(groups),
      HostLeadOptions{heartbeat_timeout, options_.step_timeout, &mail_, [this] { waiters_.Notify(); }, options_.spin},
      &trace_);
}

// Gradients are there as long as windows are: trainers that were told of the abort do not write them any more.
absl::Status JobShard::End(absl::Span<const Rank> members, const std::atomic<bool>& cancelled, absl::Duration timeout) {
  MutexLock ending_lock(ending_mu_);
  if (ending().has_value()) return absl::OkStatus();
  protocol_->members().Abort(AbortReason::kReformed, rank().value(), rank());
  TellReaders(BoardOver::kEnded);
  engine_->Stop();
  ControlBlock& control = *protocol_->control();
  TellStopped(control, rank());
  ASSIGN_OR_RETURN(const Ending ending, AwaitEnding(
                                            control, members, [&] { return cancelled.load(); }, timeout));
  const uint64_t done = control.members[rank().value()].done.load(std::memory_order_acquire);
  if (done > ending.seq) {
    return absl::FailedPreconditionError("it went on with a step while the others ended the epoch");
  }
  if (ending.steps && done != ending.seq) {
    RETURN_IF_ERROR(pass_->Run(control.commands[ending.seq % 2], ending.seq, nullptr).status());
  }
  MutexLock lock(mu_);
  ending_ = ending;
  return absl::OkStatus();
}

std::optional<Ending> JobShard::ending() const {
  MutexLock lock(mu_);
  return ending_;
}

absl::Status JobShard::CheckHasNoWeights() const {
  const Step committed = protocol_->committed_step();
  if (committed.value() == kNoStep && protocol_->control()->restored_step_plus_one.load() == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("job ", spec().name, " has weights already, of step ",
                                                    committed.value(), "; restore into a new job, or delete it first"));
}

absl::Status JobShard::CheckCopyFits() const {
  return shardmesh::CheckCopyFits(spec(), plan_, options_.capacity, protocol_->local().per_host);
}

absl::Status JobShard::Load(uint64_t load_id, Step step, const std::function<absl::Status()>& read) {
  return engine_->Load(load_id, step, read);
}

absl::Status JobShard::UseLoaded(const v1::UseLoadedRequest& request) {
  RETURN_IF_ERROR(requests_.CheckEpoch(request.epoch()));
  RETURN_IF_ERROR(Health());
  const bool same = protocol_->control()->members[rank().value()].loaded_id.load() == request.load_id();
  if (same) return absl::OkStatus();
  RETURN_IF_ERROR(CheckHasNoWeights());
  return engine_->UseLoaded(request.load_id());
}

void JobShard::TakeMemory(absl::Duration patience, const std::atomic<bool>& cancelled) {
  if (on_device()) return;
  const int64_t until = MonotonicNanos() + absl::ToInt64Nanoseconds(patience);
  ThreadTeam team(options_.threads);
  team.ForEach(static_cast<int>(storage_->ranges().size()), [&](int range) {
    if (cancelled.load() || MonotonicNanos() > until) return;
    storage_->Populate(range);
    if (plan_.bucketed()) return;  // its window has what trainers hold
    const StorageRange& r = storage_->ranges()[range];
    const Bucket& bucket = plan_.buckets()[r.bucket];
    const int64_t begin = bucket.weight_offset + bucket.CodeOffset(r.bucket_begin);
    host_.window().Populate(begin, bucket.CodeOffset(r.num_elements));
    host_.publication(0).Populate(begin, bucket.CodeOffset(r.num_elements));
  });
}

void JobShard::TakeMemoryOfSteps(const std::atomic<bool>& cancelled) const {
  std::vector<const Segment*> segments;
  for (int b = 0; b < std::min(host_.num_publications(), kPublicationsInUse); ++b) {
    segments.push_back(&host_.publication(b));
  }
  for (int slot = 0; slot < spec().num_writers() && !plan_.bucketed(); ++slot) segments.push_back(&host_.slot(slot));
  constexpr int64_t kPart = int64_t{64} << 20;  // one call of the system cannot be cancelled
  for (const Segment* segment : segments) {
    for (int64_t begin = 0; begin < segment->data_bytes() && !cancelled.load(); begin += kPart) {
      segment->Populate(begin, std::min(kPart, segment->data_bytes() - begin));
    }
  }
}

void JobShard::Close() {
  closed_.store(true);
  TellReaders(BoardOver::kClosed);
  waiters_.Notify();
}

Topology JobShard::topology() const { return TopologyOf(protocol_->local(), plan_, on_device()); }

absl::Status JobShard::Health() const {
  const absl::Status health = protocol_->members().Health();  // comes first: who was lost is why it is closed, too
  return health.ok() ? CheckOpen() : health;
}

absl::Status JobShard::CheckOpen() const {
  if (!closed_.load()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("job ", spec().name, " was deleted, or moved to other workers"));
}

absl::Status JobShard::HealthOf(const v1::StepRequest& request) const {
  RETURN_IF_ERROR(Health());
  return requests_.CheckStands(request);
}

bool JobShard::BeginPush(int slot) {
  if (slot >= 0) return protocol_->slots().ClaimPush(Slot(slot), place_.shard, rank());
  MutexLock lock(mu_);
  return pushes_.insert(slot).second;
}

void JobShard::EndPush(int slot) {
  if (slot >= 0) return protocol_->slots().ReleasePush(Slot(slot), place_.shard);
  MutexLock lock(mu_);
  pushes_.erase(slot);
}

void JobShard::Tick(int64_t now_nanos, absl::Duration heartbeat_timeout, bool retained) {
  protocol_->members().SignOfLife(rank(), now_nanos, getpid(), retained);
  protocol_->members().CheckPeers(rank(), now_nanos, heartbeat_timeout);
  leases_->Sweep();
  if (!protocol_->members().Health().ok()) TellReaders(BoardOver::kEnded);
  waiters_.Notify();
}

// They ask their worker why.
void JobShard::TellReaders(BoardOver how) {
  std::atomic<uint32_t>& over = host_.board().over;
  uint32_t was = over.load();
  while (was < static_cast<uint32_t>(how)) {
    if (over.compare_exchange_weak(was, static_cast<uint32_t>(how))) return protocol_->publications().Notify();
  }
}

bool JobShard::is_over() const { return closed_.load() || ending().has_value(); }

void JobShard::KeepVersionsOnly() {
  {
    MutexLock lock(ending_mu_);
    engine_->Stop();
  }
  const auto give_back = [](const Segment& segment) {
    const int64_t whole = segment.data_bytes() / kSegmentPage * kSegmentPage;
    if (segment.data_offset() % kSegmentPage == 0) segment.Punch(0, whole).IgnoreError();
  };
  if (storage_.has_value()) give_back(storage_->segment());
  if (GradientSums::Has(plan_) && sums_.has_value()) give_back(sums_->segment());
  for (int slot = 0; slot < spec().num_writers(); ++slot) give_back(host_.slot(slot));
}

}  // namespace shardmesh
