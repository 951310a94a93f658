#include "worker/job/job_shard.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/memory/file_hold.h"
#include "local/memory/futex.h"

namespace shardmesh {
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
      host_(std::make_unique<HostMemory>(std::move(host))),
      memory_(std::make_unique<ShardMemory>(options_.spec, plan_, *host_, options_.threads, options_.capacity,
                                            options_.ranks.value_or(HostRanks::OneHost(plan_.num_ranks())).per_host)),
      snapshots_(std::make_unique<SnapshotPort>()),
      pulls_(std::make_unique<PullsUnderWay>()),
      protocol_(std::make_unique<StepProtocol>(host_->control(), &host_->notifier(), &options_.spec, &plan_,
                                               options_.worker_names, options_.ranks, options_.rank, options_.epoch,
                                               &trace_)),
      pushes_(std::make_unique<PushClaims>(*protocol_, place_.shard, options_.rank)),
      requests_(*protocol_),
      mail_(*host_, *protocol_, options_.spec.num_writers(), requests_) {
  const auto mapped = [this](int buffer) { return IsFileHeld(host_->publication(buffer).fd()); };
  const auto mapped_at = [this](int b, int seat) { return IsFileHeldAt(host_->publication(b).fd(), seat); };
  protocol_->publications().ShowOn(&host_->board(), mapped);
  protocol_->publications().NamePullsBy([this](int buffer) {
    std::vector<std::string> pullers;
    for (const PullsUnderWay::Pull& pull : pulls_->List()) {
      if (pull.buffer == buffer) pullers.push_back(pull.puller);
    }
    return pullers;
  });
  leases_ = std::make_unique<VersionLeases>(host_->control(), &protocol_->publications(), &options_.spec, options_.rank,
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
  epoch_end_ = std::make_unique<EpochEnd>(*protocol_, *pass_, *engine_, options_.rank);
  return absl::OkStatus();
}

absl::Status JobShard::OpenPass(Memory& memory, const std::atomic<bool>* cancelled) {
  if (options_.device != nullptr) {
    const ReplicaShare share = ShareOf(plan_, protocol_->local(), options_.rank);
    DevicePassOptions options;
    options.timeout = options_.step_timeout;
    options.cancelled = cancelled;
    ASSIGN_OR_RETURN(auto pass,
                     DevicePass::Create(options_.spec, plan_, place_, *host_, *options_.device, share, options));
    pass->TakeSnapshots(snapshots_.get());
    pass_ = std::move(pass);
    return absl::OkStatus();
  }
  const std::string name = absl::StrCat("shardmesh-", options_.spec.name, "-shard-", options_.rank.value());
  RETURN_IF_ERROR(memory_->Open(memory, name, place_.shard, cancelled));
  auto pass = std::make_unique<Pass>(options_.spec, plan_, place_, *host_, memory_->storage(), options_.threads,
                                     &trace_, memory_->sums(), protocol_->local());
  // A trainer that takes a slot waits for no sum.
  if (rank() == Rank(0) && plan_.pulled() && protocol_->local().alone()) pass->WhileMerging([this] { mail_.Poll(); });
  pass->TakeSnapshots(snapshots_.get());
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

void JobShard::StartHosts(HostGroups groups, absl::Duration heartbeat_timeout, MeetAgain meet_again) {
  MutexLock lock(hosts_mu_);
  host_lead_ = std::make_unique<HostLead>(
      *protocol_, *host_, *pass_, options_.spec, plan_, std::move(groups),
      HostLeadOptions{heartbeat_timeout, options_.step_timeout, &mail_, [this] { waiters_.Notify(); }, options_.spin,
                      std::move(meet_again), &apart_},
      &trace_);
}

absl::Status JobShard::End(const EpochMembers& members, const std::atomic<bool>& cancelled, absl::Duration timeout) {
  return epoch_end_->Run(members, cancelled, timeout, [this] {
    TellReaders(BoardOver::kEnded);
    MutexLock lock(hosts_mu_);
    if (host_lead_ != nullptr) host_lead_->Stop();
  });
}

ShardRun JobShard::run() const {
  return {*pass_,
          *engine_,
          *snapshots_,
          trace_,
          host_lead_.get(),
          options_.threads,
          absl::Nanoseconds(MonotonicNanos() - moved_nanos_.load())};
}

void JobShard::Close() {
  closed_.store(true);
  TellReaders(BoardOver::kClosed);
  waiters_.Notify();
}

absl::Status JobShard::Health() const {
  const absl::Status health = protocol_->members().Health();  // comes first: who was lost is why it is closed, too
  return health.ok() ? CheckOpen() : health;
}

absl::Status JobShard::CheckOpen() const {
  if (!closed_.load()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("job ", spec().name, " was deleted, or moved to other workers"));
}

bool JobShard::Tick(int64_t now_nanos, absl::Duration heartbeat_timeout, bool retained) {
  protocol_->members().SignOfLife(rank(), now_nanos, getpid(), retained);
  protocol_->members().CheckPeers(rank(), now_nanos, heartbeat_timeout);
  leases_->Sweep();
  if (!protocol_->members().Health().ok()) TellReaders(BoardOver::kEnded);
  waiters_.Notify();
  return apart_.load();
}

// They ask their worker why.
void JobShard::TellReaders(BoardOver how) {
  std::atomic<uint32_t>& over = host_->board().over;
  uint32_t was = over.load();
  while (was < static_cast<uint32_t>(how)) {
    if (over.compare_exchange_weak(was, static_cast<uint32_t>(how))) return protocol_->publications().Notify();
  }
}

bool JobShard::is_over() const { return closed_.load() || epoch_end_->ending().has_value(); }

Topology TopologyOf(const JobShard& shard) {
  return TopologyOf(shard.protocol().local(), shard.plan(), shard.host().device() != nullptr);
}

absl::Status CheckHasNoWeights(const JobShard& shard) {
  const Step committed = shard.protocol().committed_step();
  const bool restored = shard.protocol().control()->restored_step_plus_one.load() != 0;
  if (committed.value() == kNoStep && !restored) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("job ", shard.spec().name, " has weights already, of step ",
                                                    committed.value(), "; restore into a new job, or delete it first"));
}

absl::Status UseLoaded(const JobShard& shard, const v1::UseLoadedRequest& request) {
  RETURN_IF_ERROR(shard.protocol().members().CheckEpoch(request.epoch()));
  RETURN_IF_ERROR(shard.Health());
  const ControlBlock& control = *shard.protocol().control();
  if (control.members[shard.rank().value()].loaded_id.load() == request.load_id()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckHasNoWeights(shard));
  return shard.run().engine.UseLoaded(request.load_id());
}

}  // namespace shardmesh
