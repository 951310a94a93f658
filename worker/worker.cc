#include "worker/worker.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/status.h"
#include "local/futex.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLinkTimeout = absl::Seconds(10);  // for one message between peers
constexpr absl::Duration kLinkSlice = absl::Milliseconds(200);
constexpr absl::Duration kRetry = absl::Milliseconds(50);
// At least this often waiting calls look at their deadlines: they answer what they waited for before the caller gives
// up.
constexpr absl::Duration kMaxTick = absl::Milliseconds(50);

std::vector<std::string> WorkerNames(const v1::Assignment& assignment) {
  std::vector<std::string> names;
  for (const v1::Peer& peer : assignment.peers()) names.push_back(peer.worker());
  return names;
}

// Waits on a link that carries nothing any more, until its other end is gone or `done` says so. True: gone.
template <typename Done>
bool AwaitHangUp(LocalSocket& link, Done done) {
  while (!done()) {
    if (absl::IsUnavailable(link.Receive(kLinkSlice).status())) return true;
  }
  return false;
}

}  // namespace

Worker::Worker(WorkerOptions options, std::unique_ptr<Memory> memory)
    : options_(std::move(options)), memory_(std::move(memory)), heartbeat_timeout_(options_.heartbeat_timeout) {
  monitor_ = std::thread([this] { Monitor(); });
}

Worker::~Worker() {
  OnChange(nullptr);
  {
    MutexLock lock(mu_);
    stop_ = true;
  }
  stopped_.SignalAll();
  monitor_.join();
  std::map<std::string, std::shared_ptr<Entry>> jobs;
  {
    MutexLock lock(mu_);
    jobs.swap(jobs_);
  }
  for (auto& [name, entry] : jobs) Close(entry);
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

void Worker::Reconcile(const std::vector<v1::Assignment>& assignments) {
  std::vector<std::shared_ptr<Entry>> gone;
  {
    MutexLock lock(mu_);
    std::map<std::string, std::shared_ptr<Entry>> keep;
    for (const v1::Assignment& assignment : assignments) {
      if (keep.count(assignment.spec().name()) > 0) continue;  // said twice: the first counts
      auto it = jobs_.find(assignment.spec().name());
      if (it != jobs_.end() && it->second->assignment.epoch() == assignment.epoch()) {
        keep.insert(*it);
        jobs_.erase(it);
        continue;
      }
      auto entry = std::make_shared<Entry>();
      entry->assignment = assignment;
      entry->preparing = std::thread([this, entry] { Prepare(entry); });
      keep[assignment.spec().name()] = entry;
    }
    for (auto& [name, entry] : jobs_) gone.push_back(entry);
    jobs_ = std::move(keep);
  }
  for (const std::shared_ptr<Entry>& entry : gone) {
    spdlog::info("event=job_closed job={} epoch={}", entry->assignment.spec().name(), entry->assignment.epoch());
    Close(entry);
  }
}

void Worker::Close(const std::shared_ptr<Entry>& entry) {
  entry->closing.store(true);
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (shard != nullptr) shard->Close();
  if (entry->preparing.joinable()) entry->preparing.join();
  MutexLock lock(mu_);
  entry->shard.reset();
}

void Worker::Leave() {
  std::vector<std::shared_ptr<Entry>> entries;
  {
    MutexLock lock(mu_);
    for (const auto& [name, entry] : jobs_) entries.push_back(entry);
  }
  for (const std::shared_ptr<JobShard>& shard : Jobs()) {
    shard->protocol().Abort(AbortReason::kLeft, shard->rank().value(), shard->rank());
    shard->Close();
  }
  for (const std::shared_ptr<Entry>& entry : entries) entry->closing.store(true);  // ends the links to peers
}

std::vector<v1::MemberStatus> Worker::Statuses() const {
  std::vector<v1::MemberStatus> statuses;
  MutexLock lock(mu_);
  for (const auto& [name, entry] : jobs_) {
    v1::MemberStatus status;
    status.set_job(name);
    status.set_epoch(entry->assignment.epoch());
    status.set_rank(entry->assignment.rank());
    status.set_state(entry->state);
    status.set_plan_hash(entry->plan_hash);
    status.set_error(entry->error);
    status.set_committed_step(kNoStep);
    if (entry->shard != nullptr) {
      StepProtocol& protocol = entry->shard->protocol();
      status.set_committed_step(protocol.committed_step().value());
      for (Step step : protocol.Published()) status.add_published_steps(step.value());
      if (const absl::Status health = protocol.Health(); !health.ok()) {
        status.set_state(v1::MEMBER_STATE_FAILED);
        status.set_error(std::string(health.message()));
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
  if (it->second->shard != nullptr) return it->second->shard;
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
  const absl::Status status = Build(entry);
  if (status.ok() || entry->closing.load()) return;
  spdlog::error("event=job_failed job={} epoch={} error=\"{}\"", entry->assignment.spec().name(),
                entry->assignment.epoch(), status.ToString());
  {
    MutexLock lock(mu_);
    entry->state = v1::MEMBER_STATE_FAILED;
    entry->error = absl::StrCat("worker ", options_.name, " could not prepare it: ", status.message());
  }
  Changed();
}

absl::Status Worker::Build(const std::shared_ptr<Entry>& entry) {
  const v1::Assignment& assignment = entry->assignment;
  ASSIGN_OR_RETURN(JobSpec spec, JobSpecFromProto(assignment.spec()));
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  if (assignment.peers_size() != plan.num_ranks() || assignment.rank() < 0 || assignment.rank() >= plan.num_ranks()) {
    return absl::InvalidArgumentError(absl::StrCat("assigned rank ", assignment.rank(), " among ",
                                                   assignment.peers_size(), " members; the mesh ", spec.mesh.ToString(),
                                                   " has ", plan.num_ranks()));
  }
  {
    MutexLock lock(mu_);
    entry->plan_hash = plan.hash();
  }
  if (plan.hash() != assignment.plan_hash()) {
    return absl::FailedPreconditionError(absl::StrCat("plan hash ", plan.hash(), " differs from the coordinator's ",
                                                      assignment.plan_hash(),
                                                      "; run one build of shardmesh everywhere"));
  }
  const bool lead = assignment.rank() == 0;
  std::unique_ptr<LocalSocket> link;
  JobShardOptions options{spec,
                          Epoch(assignment.epoch()),
                          Rank(assignment.rank()),
                          WorkerNames(assignment),
                          options_.threads,
                          options_.step_timeout};
  ASSIGN_OR_RETURN(HostMemory host, lead ? HostMemory::Create(*memory_, spec.name, spec.num_slots, plan)
                                         : FetchFromLead(*entry, spec, plan, link));
  ASSIGN_OR_RETURN(std::shared_ptr<JobShard> shard,
                   JobShard::Create(std::move(options), std::move(plan), std::move(host), *memory_));
  shard->Tick(MonotonicNanos(), heartbeat_timeout());
  {
    MutexLock lock(mu_);
    entry->shard = shard;
    entry->mapped.assign(shard->plan().num_ranks(), false);
    entry->state = v1::MEMBER_STATE_READY;
  }
  spdlog::info("event=job_ready job={} epoch={} rank={} shard={} replica={} plan={}", spec.name, assignment.epoch(),
               assignment.rank(), shard->place().shard, shard->place().replica, shard->plan().hash());
  if (lead) PeerMapped(entry, 0);
  Changed();
  if (link != nullptr) WatchLead(entry, *link);
  return absl::OkStatus();
}

// The lead may not know of the job yet (its heartbeat comes later): asks again until the deadline.
absl::StatusOr<HostMemory> Worker::FetchFromLead(Entry& entry, const JobSpec& spec, const Plan& plan,
                                                 std::unique_ptr<LocalSocket>& link) {
  const v1::Assignment& assignment = entry.assignment;
  const v1::Peer& lead = assignment.peers(0);
  v1::LocalHello hello;
  hello.mutable_peer()->set_job(spec.name);
  hello.mutable_peer()->set_epoch(assignment.epoch());
  hello.mutable_peer()->set_rank(assignment.rank());
  hello.mutable_peer()->set_incarnation(assignment.peers(assignment.rank()).incarnation());
  hello.mutable_peer()->set_plan_hash(plan.hash());
  const absl::Time deadline = absl::Now() + options_.prepare_timeout;
  absl::Status last = absl::UnavailableError("it was not asked");
  while (absl::Now() < deadline && !entry.closing.load()) {
    const auto ask = [&]() -> absl::StatusOr<HostMemory> {
      ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(lead.local_socket()));
      RETURN_IF_ERROR(socket.Send(hello.SerializeAsString(), {}, kLinkTimeout));
      ASSIGN_OR_RETURN(LocalMessage message, socket.Receive(kLinkTimeout));
      v1::LocalWelcome welcome;
      if (!welcome.ParseFromString(message.bytes))
        return absl::InternalError("the lead sent a message that is no welcome");
      if (welcome.code() != 0) return absl::Status(static_cast<absl::StatusCode>(welcome.code()), welcome.message());
      ASSIGN_OR_RETURN(HostMemory host, HostMemory::Map(welcome, std::move(message.descriptors), spec.num_slots, plan));
      RETURN_IF_ERROR(socket.Send("mapped", {}, kLinkTimeout));
      link = std::make_unique<LocalSocket>(std::move(socket));
      return host;
    };
    absl::StatusOr<HostMemory> host = ask();
    if (host.ok()) return host;
    last = host.status();
    if (!absl::IsUnavailable(last) && !absl::IsNotFound(last)) break;
    MutexLock lock(mu_);
    stopped_.WaitFor(mu_, kRetry);
  }
  return Annotate(last, absl::StrCat("getting the shared memory from worker ", lead.worker(), " (rank 0, pid ",
                                     lead.pid(), ") at ", lead.local_socket()));
}

void Worker::WatchLead(const std::shared_ptr<Entry>& entry, LocalSocket& link) {
  const bool gone = AwaitHangUp(link, [&] { return entry->closing.load(); });
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (gone && shard != nullptr && !entry->closing.load()) {
    shard->protocol().Abort(AbortReason::kGone, 0, shard->rank());
    Changed();
  }
}

absl::StatusOr<std::shared_ptr<Worker::Entry>> Worker::FindLead(const v1::PeerHello& hello) const {
  MutexLock lock(mu_);
  auto it = jobs_.find(hello.job());
  if (it == jobs_.end() || it->second->shard == nullptr || it->second->assignment.epoch() < hello.epoch()) {
    return absl::UnavailableError(
        absl::StrCat("worker ", options_.name, " has no memory of job ", hello.job(), " yet"));
  }
  const v1::Assignment& mine = it->second->assignment;
  if (mine.epoch() > hello.epoch()) {
    return absl::AbortedError(
        absl::StrCat("epoch ", hello.epoch(), " of job ", hello.job(), " is over; now ", mine.epoch()));
  }
  if (mine.rank() != 0 || hello.rank() < 1 || hello.rank() >= mine.peers_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", hello.rank(), " asks rank ", mine.rank(), "; peers ask rank 0"));
  }
  if (mine.peers(hello.rank()).incarnation() != hello.incarnation()) {
    return absl::AbortedError(absl::StrCat("rank ", hello.rank(), " is incarnation ",
                                           mine.peers(hello.rank()).incarnation(), " in this epoch, not ",
                                           hello.incarnation()));
  }
  if (it->second->plan_hash != hello.plan_hash()) {
    return absl::FailedPreconditionError(absl::StrCat("plan hash ", hello.plan_hash(), " differs from the lead's ",
                                                      it->second->plan_hash,
                                                      "; run one build of shardmesh everywhere"));
  }
  return it->second;
}

void Worker::PeerMapped(const std::shared_ptr<Entry>& entry, int rank) {
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    entry->mapped[rank] = true;
    for (bool mapped : entry->mapped) {
      if (!mapped) return;
    }
    shard = entry->shard;
  }
  if (shard == nullptr) return;
  if (const absl::Status sealed = shard->host().Seal(); !sealed.ok())
    spdlog::warn("event=seal_failed error=\"{}\"", sealed.ToString());
}

void Worker::ServePeer(LocalSocket socket, const v1::PeerHello& hello, const std::atomic<bool>& stop) {
  v1::LocalWelcome welcome;
  absl::StatusOr<std::shared_ptr<Entry>> found = FindLead(hello);
  if (!found.ok()) {
    welcome.set_code(static_cast<int>(found.status().code()));
    welcome.set_message(std::string(found.status().message()));
    socket.Send(welcome.SerializeAsString(), {}, kLinkTimeout).IgnoreError();
    return;
  }
  const std::shared_ptr<Entry> entry = *found;
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (shard == nullptr) return;
  shard->host().DescribeTo(welcome);
  if (!socket.Send(welcome.SerializeAsString(), shard->host().PeerDescriptors(), kLinkTimeout).ok()) return;
  if (!socket.Receive(kLinkTimeout).ok()) return;
  PeerMapped(entry, hello.rank());
  shard.reset();
  const bool gone = AwaitHangUp(socket, [&] { return entry->closing.load() || stop.load(); });
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (gone && shard != nullptr && !entry->closing.load()) {
    shard->protocol().Abort(AbortReason::kGone, hello.rank(), shard->rank());
    Changed();
  }
}

// Signs of life and looks at peers, a few times per heartbeat time-out. After a gap of its own (the whole machine
// slept, or this process was stopped) one round looks at nobody: the others had the same gap.
void Worker::Monitor() {
  int64_t last = MonotonicNanos();
  while (true) {
    absl::Duration timeout;
    {
      MutexLock lock(mu_);
      stopped_.WaitFor(mu_, std::min(heartbeat_timeout_ / 8, kMaxTick));
      if (stop_) return;
      timeout = heartbeat_timeout_;
    }
    const int64_t now = MonotonicNanos();
    const bool gap = absl::Nanoseconds(now - last) > timeout / 2;
    last = now;
    for (const std::shared_ptr<JobShard>& shard : Jobs()) {
      shard->Tick(now, gap ? absl::Hours(1) : timeout);
      // The kernel ends a connection, a socket or a process when it dies; the health then changed: tell the
      // coordinator.
      if (!shard->protocol().Health().ok()) Changed();
    }
  }
}

}  // namespace shardmesh
