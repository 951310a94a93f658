#include "worker/process/worker.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/job/support.h"
#include "local/memory/futex.h"
#include "proto/convert.h"
#include "worker/lead/hosts/host_meeting.h"
#include "worker/process/peer_patience.h"

namespace shardmesh {
namespace {

// At least this often waiting calls look at their deadlines: they answer what they waited for before the caller gives
// up.
constexpr absl::Duration kTakeMemory = absl::Seconds(10);  // clients wait a minute for a job to be ready
constexpr absl::Duration kMaxTick = absl::Milliseconds(50);
constexpr int kTicksOfHurry = 3;  // between heartbeats
constexpr absl::Duration kReapSlice = absl::Seconds(1);

std::vector<std::string> WorkerNames(const v1::Assignment& assignment) {
  std::vector<std::string> names;
  const bool one_host = HostRanksOf(assignment).value_or(HostRanks()).alone();
  for (const v1::Peer& peer : assignment.peers()) {
    names.push_back(one_host ? peer.worker() : absl::StrCat(peer.worker(), " at ", peer.address()));
  }
  return names;
}

// Of a staged job: what the host has of it now, which stays until it has gone on.
absl::StatusOr<int64_t> MemoryBeside(const v1::Assignment& assignment, const JobSpec& spec) {
  if (!assignment.staged()) return 0;
  ASSIGN_OR_RETURN(const Plan now, PlanOn(spec, assignment.from().mesh()));
  return MemoryOf(now, spec).total();
}

}  // namespace

Worker::Worker(WorkerOptions options, std::unique_ptr<Memory> memory)
    : options_(std::move(options)), memory_(std::move(memory)), heartbeat_timeout_(options_.heartbeat_timeout) {
  monitor_ = std::thread([this] { Monitor(); });
  reaper_ = std::thread([this] { Reap(); });
  if (options_.node != nullptr) options_.node->OnChange([this] { TellWhetherRetained(); });
}

Worker::~Worker() {
  OnChange(nullptr);
  if (options_.node != nullptr) options_.node->OnChange(nullptr);
  Reconcile({});
  SweepPast(/*all=*/true);
  {
    MutexLock lock(mu_);
    stop_ = true;
  }
  stopped_.SignalAll();
  reap_.SignalAll();
  monitor_.join();
  reaper_.join();
}

std::string Worker::DeviceText() const {
  if (!options_.device.has_value()) return "cpu";
  return absl::StrCat("cuda:", copies()->device(), " (", copies()->name(), ")");
}

void Worker::SetHeartbeatTimeout(absl::Duration timeout) {
  MutexLock lock(mu_);
  heartbeat_timeout_ = timeout;
}

absl::Duration Worker::heartbeat_timeout() const {
  MutexLock lock(mu_);
  return heartbeat_timeout_;
}

void Worker::OnChange(std::function<void()> callback) {
  MutexLock lock(callback_mu_);
  on_change_ = std::move(callback);
}

void Worker::Changed() {
  MutexLock lock(callback_mu_);
  if (on_change_) on_change_();
}

void Worker::Close(const std::shared_ptr<Entry>& entry) {
  entry->closing.store(true);
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (shard != nullptr) shard->Close();
  MutexLock lock(mu_);
  shard.reset();  // the entry has another: whoever closes does not destroy
  closed_.push_back(entry);
  reap_.SignalAll();
}

// Ends what was closed, apart from who closed it: a preparation may take a while to see that it is not wanted any more,
// and the system to take a large memory back.
void Worker::Reap() {
  while (true) {
    std::shared_ptr<Entry> entry;
    {
      MutexLock lock(mu_);
      while (closed_.empty() && !stop_) reap_.WaitFor(mu_, kReapSlice);
      if (closed_.empty()) return;
      entry = std::move(closed_.front());
      closed_.pop_front();
    }
    if (entry->preparing.joinable()) entry->preparing.join();
    if (LeaveVersions(*entry)) continue;  // comes again when its leases have ended
    {
      std::shared_ptr<JobShard> shard;  // destroyed without a lock
      MutexLock round(round_mu_);
      MutexLock lock(mu_);
      shard.swap(entry->shard);
    }
    Drop(*entry);
  }
}

void Worker::Leave() {
  std::vector<std::shared_ptr<Entry>> entries;
  {
    MutexLock lock(mu_);
    for (const Entries* all : {&jobs_, &staged_}) {
      for (const auto& [name, entry] : *all) entries.push_back(entry);
    }
  }
  for (const std::shared_ptr<JobShard>& shard : Jobs()) {
    shard->protocol().members().Abort(AbortReason::kLeft, shard->rank().value(), shard->rank());
    shard->Close();
  }
  for (const std::shared_ptr<Entry>& entry : entries) entry->closing.store(true);  // ends the links to peers
}

std::vector<v1::MemberStatus> Worker::Statuses() const {
  std::vector<v1::MemberStatus> statuses;
  MutexLock lock(mu_);
  std::vector<std::shared_ptr<Entry>> entries;
  for (const Entries* all : {&jobs_, &staged_}) {
    for (const auto& [name, entry] : *all) entries.push_back(entry);
  }
  for (const std::shared_ptr<Entry>& entry : entries) {
    v1::MemberStatus status;
    status.set_job(entry->assignment.spec().name());
    status.set_epoch(entry->assignment.epoch());
    status.set_rank(entry->assignment.rank());
    status.set_state(entry->state);
    status.set_plan_hash(entry->plan_hash);
    status.set_error(entry->error);
    status.set_committed_step(kNoStep);
    if (entry->loaded_digest.has_value()) status.set_loaded_digest(*entry->loaded_digest);
    status.set_unreadable(entry->unreadable);
    if (entry->shard != nullptr) {
      StepProtocol& protocol = entry->shard->protocol();
      const Step committed = protocol.committed_step();
      status.set_committed_step(committed.value());
      for (Step step : protocol.publications().Published()) {  // the newest may be shown before its step is committed
        if (step.value() <= committed.value()) status.add_published_steps(step.value());
      }
      // What it failed by itself comes first.
      if (const absl::Status health = protocol.members().Health(); !health.ok() && entry->error.empty()) {
        status.set_state(v1::MEMBER_STATE_FAILED);
        status.set_error(std::string(health.message()));
        if (const std::optional<Rank> lost = protocol.members().Lost()) status.set_lost_rank(lost->value());
      }
    }
    statuses.push_back(std::move(status));
  }
  return statuses;
}

absl::StatusOr<std::shared_ptr<JobShard>> Worker::Find(const std::string& job) const {
  MutexLock lock(mu_);
  auto it = jobs_.find(job);
  if (it == jobs_.end()) {
    return absl::NotFoundError(absl::StrCat("worker ", options_.name, " holds no job \"", job.substr(0, 200),
                                            "\"; ask the coordinator which workers do (shardctl jobs)"));
  }
  if (it->second->shard != nullptr && !Moves(*it->second)) return it->second->shard;
  if (it->second->state == v1::MEMBER_STATE_FAILED) return absl::UnavailableError(it->second->error);
  return absl::UnavailableError(absl::StrCat("worker ", options_.name, " is still preparing job ", job, "; try again"));
}

std::vector<std::shared_ptr<JobShard>> Worker::Jobs() const {
  std::vector<std::shared_ptr<JobShard>> shards;
  MutexLock lock(mu_);
  for (const auto& [name, entry] : jobs_) {
    if (entry->shard != nullptr) shards.push_back(entry->shard);
  }
  return shards;
}

void Worker::Prepare(std::shared_ptr<Entry> entry) {
  std::unique_ptr<LocalSocket> link;
  const absl::Status status = WithoutThrowing([&] { return Build(entry, link); });
  if (status.ok() || entry->closing.load()) return;
  bool lost_another = false;  // then the job's health says whom
  if (entry->assignment.has_from() || entry->assignment.has_back()) {
    MutexLock lock(mu_);
    lost_another = entry->shard != nullptr && entry->shard->protocol().members().Lost().has_value();
  }
  spdlog::error("event=job_failed job={} epoch={} error=\"{}\"", entry->assignment.spec().name(),
                entry->assignment.epoch(), status.ToString());
  if (!lost_another) {
    MutexLock lock(mu_);
    entry->state = v1::MEMBER_STATE_FAILED;
    entry->error = absl::StrCat("worker ", options_.name, " could not prepare it: ", status.message());
    // Its hosts did not meet: this host's members have no other way to know. With the state, so that whoever sees one
    // sees the other.
    const bool meets = entry->shard != nullptr && !entry->ranks.alone();
    const int lead = entry->ranks.first();
    if (meets) entry->shard->protocol().members().AbortFor(AbortReason::kNotMet, lead, status.message());
  }
  Changed();
  // Held on, so that the lead does not take this worker for a dead one: why it failed is its own to say.
  if (link != nullptr) WatchLead(entry, *link);
}

absl::StatusOr<Worker::Task> Worker::TaskOf(const Entry& entry) const {
  const v1::Assignment& assignment = entry.assignment;
  ASSIGN_OR_RETURN(JobSpec spec, JobSpecFromProto(assignment.spec()));
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  if (assignment.peers_size() != plan.num_ranks() || assignment.rank() < 0 || assignment.rank() >= plan.num_ranks()) {
    return absl::InvalidArgumentError(absl::StrCat("assigned rank ", assignment.rank(), " among ",
                                                   assignment.peers_size(), " members; the mesh ", spec.mesh.ToString(),
                                                   " has ", plan.num_ranks()));
  }
  ASSIGN_OR_RETURN(const HostRanks ranks, HostRanksOf(assignment));
  const Topology topology = TopologyOf(ranks, plan, options_.device.has_value());
  const bool lead = assignment.rank() == ranks.first(), restores = assignment.has_from() && !entry.resumed;
  const bool goes_back = assignment.has_back() && !entry.resumed;
  return Task{std::move(spec), std::move(plan), ranks, topology, lead, restores, goes_back};
}

absl::Status Worker::CheckTask(const Entry& entry, const Task& task) const {
  const v1::Assignment& assignment = entry.assignment;
  if (task.plan.hash() != assignment.plan_hash()) {
    return absl::FailedPreconditionError(absl::StrCat("plan hash ", task.plan.hash(),
                                                      " differs from the coordinator's ", assignment.plan_hash(),
                                                      "; run one build of shardmesh everywhere"));
  }
  RETURN_IF_ERROR(CheckSupported(task.spec, task.plan, task.topology));
  if (task.restores) {
    const Feature moves = assignment.staged() ? Feature::kReshard : Feature::kReform;
    RETURN_IF_ERROR(CheckSupported(task.spec, task.plan, task.topology, moves));
    RETURN_IF_ERROR(CheckOrigin(assignment));
  }
  ASSIGN_OR_RETURN(const int64_t beside, MemoryBeside(assignment, task.spec));
  if (task.topology.device) return absl::OkStatus();
  return CheckFits(task.spec, task.plan, options_.host_capacity, task.ranks.per_host, beside);
}

absl::StatusOr<std::shared_ptr<JobShard>> Worker::OpenShard(const std::shared_ptr<Entry>& entry, const Task& task,
                                                            std::unique_ptr<LocalSocket>& link) {
  const v1::Assignment& assignment = entry->assignment;
  const bool restarts = CheckSupported(task.spec, task.plan, task.topology, Feature::kRestart).ok();
  const std::unique_ptr<Memory> memory = MemoryFor(*entry, restarts);
  JobShardOptions options{task.spec,
                          Epoch(assignment.epoch()),
                          Rank(assignment.rank()),
                          WorkerNames(assignment),
                          options_.threads,
                          options_.step_timeout,
                          options_.spin,
                          task.ranks,
                          options_.device.has_value() ? &*options_.device : nullptr,
                          entry->resumed,
                          options_.host_capacity};
  ASSIGN_OR_RETURN(HostMemory host, task.lead || entry->resumed
                                        ? HostMemory::Create(*memory, task.spec.name, task.spec, task.plan, copies())
                                        : FetchFromLead(*entry, task.spec, task.plan, link));
  ASSIGN_OR_RETURN(std::shared_ptr<JobShard> shard,
                   JobShard::Create(std::move(options), task.plan, std::move(host), *memory, &entry->closing));
  if (!task.restores && !task.goes_back) RETURN_IF_ERROR(KeepWhole(*entry));
  BeginCopies(*entry, task);
  if (entry->resumed) shard->protocol().members().GoesOn(MonotonicNanos(), options_.node->left().away_since_nanos);
  shard->Tick(MonotonicNanos(), heartbeat_timeout(), IsRetained(*entry));
  MutexLock lock(mu_);
  if (entry->closing.load()) return absl::CancelledError("the job was closed");
  entry->shard = shard;
  entry->ranks = task.ranks;
  entry->mapped.assign(task.ranks.per_host, false);
  return shard;
}

absl::Status Worker::BecomeReady(const std::shared_ptr<Entry>& entry, const Task& task, JobShard& shard) {
  const v1::Assignment& assignment = entry->assignment;
  if (task.lead && !entry->resumed) PeerMapped(entry, assignment.rank());
  if (!entry->resumed && !task.restores) shard.memory().TakeForFirstCommand(kTakeMemory, entry->closing);
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kPrepared));
  if (task.lead && !task.ranks.alone()) RETURN_IF_ERROR(MeetHosts(entry, shard));
  if (task.restores) {
    if (assignment.staged()) RETURN_IF_ERROR(AwaitCutover(entry, shard));
    RETURN_IF_ERROR(RestoreFrom(*entry, shard));
  } else if (task.goes_back) {
    RETURN_IF_ERROR(GoBack(entry, shard));
  }
  if (task.restores || task.goes_back) {
    RETURN_IF_ERROR(KeepWhole(*entry));
    shard.Tick(MonotonicNanos(), heartbeat_timeout(), IsRetained(*entry));  // who attaches now knows
  }
  if (task.ranks.alone()) EndCopies(task.spec.name, assignment.epoch());  // there are none of this one
  {
    MutexLock lock(mu_);
    entry->state = v1::MEMBER_STATE_READY;
  }
  spdlog::info("event=job_ready job={} epoch={} rank={} shard={} replica={} plan={}", task.spec.name,
               assignment.epoch(), assignment.rank(), shard.place().shard, shard.place().replica, shard.plan().hash());
  return absl::OkStatus();
}

absl::Status Worker::Build(const std::shared_ptr<Entry>& entry, std::unique_ptr<LocalSocket>& link) {
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kAssigned));
  const v1::Assignment& assignment = entry->assignment;
  if (assignment.leaves()) return EndAtCutover(entry);
  ASSIGN_OR_RETURN(const Task task, TaskOf(*entry));
  {
    MutexLock lock(mu_);
    entry->plan_hash = task.plan.hash();
  }
  RETURN_IF_ERROR(CheckTask(*entry, task));
  if (task.restores && !assignment.staged()) RETURN_IF_ERROR(EndBefore(*entry));
  ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, OpenShard(entry, task, link));
  RETURN_IF_ERROR(BecomeReady(entry, task, *shard));
  Changed();
  if (link != nullptr) WatchLead(entry, *link);
  if (entry->resumed && assignment.has_from()) EndBefore(*entry).IgnoreError();  // others may ask for what it held
  if (entry->resumed) AwaitClaims(entry, *shard);
  if (assignment.rank() == 0) RunCopies(entry, *shard);
  return absl::OkStatus();
}

void Worker::Hurry() {
  MutexLock lock(mu_);
  hurries_until_ = MonotonicNow() + heartbeat_timeout_;
}

bool Worker::Hurries() const {
  MutexLock lock(mu_);
  return MonotonicNow() < hurries_until_;
}

// Signs of life and looks at peers, a few times per heartbeat time-out.
void Worker::Monitor() {
  PeerPatience patience(MonotonicNanos());
  for (int64_t tick = 0;; ++tick) {
    absl::Duration timeout;
    {
      MutexLock lock(mu_);
      stopped_.WaitFor(mu_, std::min(heartbeat_timeout_ / 8, kMaxTick));
      if (stop_) return;
      timeout = heartbeat_timeout_;
    }
    MutexLock round(round_mu_);
    const int64_t now = MonotonicNanos();
    const absl::Duration allowed = patience.At(now, timeout);
    bool apart = false;  // another host's lead is away, and may be lost
    for (const auto& [shard, retained] : JobsAndWhetherRetained()) {
      apart = shard->Tick(now, allowed, retained) || apart;
      // The kernel ends a connection, a socket or a process when it dies; the health then changed: tell the
      // coordinator.
      if (!shard->protocol().members().Health().ok()) Changed();
    }
    if (tick % kTicksOfHurry == 0 && (apart || Hurries())) Changed();
    SweepPast();
  }
}

}  // namespace shardmesh
