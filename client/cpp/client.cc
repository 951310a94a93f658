#include "client/cpp/client.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/process/host_id.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kPollReady = absl::Milliseconds(20);
constexpr int kLooksInATimeout = 5;  // whether the coordinator says that an epoch is over
constexpr size_t kWorkersNamed = 8;  // in one message

uint64_t RandomId() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 32 | random()) | 1;
}

}  // namespace

absl::StatusOr<Client> Client::Connect(const std::string& coordinator, ClientOptions options) {
  options.tls = WithTlsEnvironment(std::move(options.tls));
  ASSIGN_OR_RETURN(std::unique_ptr<CoordinatorTransport> transport,
                   NewGrpcCoordinatorTransport(coordinator, options.tls));
  return Client(std::move(transport), std::move(options));
}

absl::StatusOr<std::shared_ptr<Job>> Client::CreateJob(const JobSpec& spec, const NameRules& rules, int64_t replaces) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = ToProto(spec);
  *request.mutable_names() = ToProto(rules);
  request.set_replaces_uid(replaces);
  RETURN_IF_ERROR(Create(std::move(request)).status());
  return OpenJob(spec.name, rules);
}

absl::StatusOr<v1::CreateJobReply> Client::Create(v1::CreateJobRequest request) {
  if (request.uid() == 0) request.set_uid(static_cast<int64_t>(RandomId() >> 1 | 1));
  return CallAgainWhile([&] { return coordinator_->has_answered(); }, options_.ready_timeout,
                        [&] { return coordinator_->CreateJob(request, options_.opening_call()); });
}

absl::Status Client::DeleteJob(const std::string& name, int64_t uid) {
  v1::DeleteJobRequest request;
  request.set_job(name);
  request.set_uid(uid);
  const absl::Status deleted =
      CallAgainWhile([&] { return coordinator_->has_answered(); }, options_.ready_timeout, [&] {
        return coordinator_->DeleteJob(request, options_.opening_call());
      }).status();
  return absl::IsNotFound(deleted) ? absl::OkStatus() : deleted;
}

absl::StatusOr<std::shared_ptr<Job>> Client::OpenJob(const std::string& name, const NameRules& rules, JobUse use) {
  return Open(name, rules, use, Absent::kError, options_.ready_timeout);
}

absl::StatusOr<std::shared_ptr<Job>> Client::AwaitJob(const std::string& name, absl::Duration timeout,
                                                      const NameRules& rules, JobUse use) {
  return Open(name, rules, use, Absent::kWait, timeout);
}

absl::StatusOr<std::shared_ptr<Job>> Client::Reopen(const Job& before, JobUse use,
                                                    std::optional<absl::Duration> timeout) {
  return Open(before.spec().name, before.rules_, use, Absent::kError, timeout.value_or(options_.ready_timeout),
              before.epoch().value());
}

absl::StatusOr<std::shared_ptr<Job>> Client::Open(const std::string& name, const NameRules& rules, JobUse use,
                                                  Absent absent, absl::Duration timeout, int64_t after) {
  v1::DescribeJobRequest request;
  request.set_job(name);
  const absl::Time deadline = MonotonicNow() + timeout;
  std::string waits_for;
  const auto late = [&] {
    return absl::DeadlineExceededError(absl::StrCat("job ", name, " was not ready within ",
                                                    absl::FormatDuration(timeout), "; it waits for ", waits_for));
  };
  while (true) {
    const absl::Duration limit = TimeOfCall(deadline, options_.call_timeout);
    const absl::StatusOr<v1::JobDescription> job = coordinator_->DescribeJob(request, limit);
    const bool silent = absl::IsDeadlineExceeded(job.status());
    const bool away = absl::IsUnavailable(job.status()) && coordinator_->has_answered();
    if (away || (after >= 0 && (silent || absl::IsUnavailable(job.status())))) {
      waits_for = absl::StrCat("the coordinator: ", job.status().message());
    } else if (silent && limit < options_.call_timeout && !waits_for.empty()) {
      return late();  // as it was before
    } else if (absent == Absent::kWait && absl::IsNotFound(job.status())) {
      waits_for = "somebody to create it";
    } else {
      RETURN_IF_ERROR(job.status());
      const bool failed = job->state() == v1::JOB_STATE_FAILED;
      const bool readable = failed && use == JobUse::kRead && job->members_size() > 0;
      const bool ready = job->state() == v1::JOB_STATE_READY && job->epoch() > after;
      if (ready || readable) return Job::Create(*job, rules, options_, coordinator_);
      if (failed) return absl::UnavailableError(absl::StrCat("job ", name, " failed: ", job->error()));
      waits_for = job->state() == v1::JOB_STATE_READY ? absl::StrCat("an epoch after ", after) : WaitsFor(*job);
    }
    if (MonotonicNow() > deadline) return late();
    Pause(kPollReady);
  }
}

namespace {

std::string WaitsForWorkers(const v1::JobDescription& job) {
  if (!job.waiting_for().empty()) return job.waiting_for();
  if (job.state() == v1::JOB_STATE_WAITING) return "workers to be assigned";
  std::vector<std::string> unready;
  for (const v1::Member& member : job.members()) {
    if (!member.ready()) unready.push_back(member.worker());
  }
  const size_t more = unready.size() - std::min(unready.size(), kWorkersNamed);
  unready.resize(unready.size() - more);
  return absl::StrCat("memory to be built by ", unready.empty() ? "its workers" : absl::StrJoin(unready, ", "),
                      more == 0 ? "" : absl::StrCat(" and ", more, " more"));
}

}  // namespace

std::string WaitsFor(const v1::JobDescription& job) {
  if (!job.has_gone_back() || job.gone_back().epoch() != 0) return WaitsForWorkers(job);
  const v1::GoneBack& back = job.gone_back();
  return absl::StrCat(WaitsForWorkers(job), ", to go back to step ", back.checkpoint().step(), " of ",
                      back.checkpoint().folder(), ", since ", back.cause());
}

absl::StatusOr<std::shared_ptr<Job>> Job::Create(const v1::JobDescription& description, const NameRules& rules,
                                                 const ClientOptions& options,
                                                 std::shared_ptr<CoordinatorTransport> coordinator) {
  ASSIGN_OR_RETURN(JobSpec spec, JobSpecFromProto(description.spec()));
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  if (plan.hash() != description.plan_hash()) {
    return absl::FailedPreconditionError(absl::StrCat("plan hash ", plan.hash(), " differs from the coordinator's ",
                                                      description.plan_hash(),
                                                      "; run one build of shardmesh everywhere"));
  }
  std::shared_ptr<Job> job(new Job(std::move(spec), std::move(plan), rules, options));
  job->coordinator_ = std::move(coordinator);
  RETURN_IF_ERROR(job->DialMembers(description));
  if (description.state() == v1::JOB_STATE_FAILED) RETURN_IF_ERROR(job->KeepLiving(description.error()));
  return job;
}

Job::Job(JobSpec spec, Plan plan, NameRules rules, ClientOptions options)
    : spec_(std::move(spec)), plan_(std::move(plan)), rules_(std::move(rules)), options_(std::move(options)) {
  for (int i = 0; i < static_cast<int>(spec_.parameters.size()); ++i) index_of_[spec_.parameters[i].name] = i;
}

absl::Status Job::DialMembers(const v1::JobDescription& description) {
  epoch_ = Epoch(description.epoch());
  uid_ = description.uid();
  if (description.has_gone_back()) gone_back_ = description.gone_back();
  peer_timeout_ = options_.peer_timeout > absl::ZeroDuration() ? options_.peer_timeout
                                                               : absl::Milliseconds(description.heartbeat_timeout_ms());
  members_.assign(description.members().begin(), description.members().end());
  if (static_cast<int>(members_.size()) != plan_.num_ranks()) {
    return absl::InternalError(absl::StrCat("job ", spec_.name, " has ", members_.size(), " members; its plan has ",
                                            plan_.num_ranks(), " ranks"));
  }
  for (const v1::Member& member : members_) {
    ASSIGN_OR_RETURN(std::unique_ptr<ShardTransport> worker, ShardTransport::Dial(member, options_.tls, peer_timeout_));
    workers_.push_back(std::move(worker));
  }
  return absl::OkStatus();
}

// A worker that was killed counts as alive until its heartbeats are missed: those of a failed job are asked.
absl::Status Job::KeepLiving(const std::string& cause) {
  bool any = false;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const bool alive = members_[rank].alive() && workers_[rank]->GetStatus(options_.call_timeout).ok();
    members_[rank].set_alive(alive);
    any = any || alive;
  }
  if (any) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("none of the workers of job ", spec_.name, " answers; it failed: ", cause));
}

absl::StatusOr<int> Job::Resolve(absl::string_view name) const {
  if (rules_.empty()) {  // then nobody said what a segment that is named like a wrapper is: the job's own names tell
    const auto own = index_of_.find(name);
    if (own != index_of_.end()) return spec_.StorageOf(own->second);
  }
  ASSIGN_OR_RETURN(const std::string canonical, Canonical(name, rules_));
  auto it = index_of_.find(canonical);
  if (it == index_of_.end()) {
    return absl::NotFoundError(absl::StrCat("job ", spec_.name, " has no parameter \"", canonical, "\" (given as \"",
                                            name.substr(0, 200), "\"); it has ", spec_.parameters.size(),
                                            ", the first is \"", spec_.parameters[0].name, "\""));
  }
  return spec_.StorageOf(it->second);
}

absl::StatusOr<std::unique_ptr<PullingSession>> Job::AttachPulling() {
  absl::StatusOr<std::unique_ptr<PullingSession>> session =
      PullingSession::Open(shared_from_this(), PullingSession::Way::kAttached);
  if (!session.ok()) return Annotate(session.status(), "attaching");
  return session;
}

absl::StatusOr<std::unique_ptr<PullingSession>> Job::ConnectPulling() {
  absl::StatusOr<std::unique_ptr<PullingSession>> session =
      PullingSession::Open(shared_from_this(), PullingSession::Way::kConnected);
  if (!session.ok()) return Annotate(session.status(), "connecting");
  return session;
}

bool Job::IsOnThisHost() const {
  const absl::StatusOr<std::string> host_id = HostId();
  return host_id.ok() && std::any_of(members_.begin(), members_.end(),
                                     [&](const v1::Member& member) { return IsOnHost(member.host_id(), *host_id); });
}

absl::StatusOr<std::unique_ptr<Session>> Job::Attach(std::vector<Slot> slots, AttachOptions options) {
  return AttachSession(shared_from_this(), std::move(slots), options);
}

absl::StatusOr<std::unique_ptr<Session>> Job::Connect(std::vector<Slot> slots) {
  return ConnectSession(shared_from_this(), std::move(slots));
}

absl::Status Job::Initialize(const std::map<std::string, std::vector<float>>& values, absl::Duration timeout) {
  std::map<int, const std::vector<float>*> given;  // by tensor
  for (const auto& [name, elements] : values) {
    ASSIGN_OR_RETURN(const int tensor, Resolve(name));
    given[tensor] = &elements;
  }
  // Every bucket as fp32 in its flat space, zeros in the padding; a shard's gradient is one stretch of each.
  std::vector<std::vector<float>> flat;
  for (const Bucket& bucket : plan_.buckets()) flat.emplace_back(bucket.num_elements, 0.0f);
  for (size_t i = 0; i < spec_.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec_.parameters[i];
    if (!parameter.tied_to.empty()) continue;
    auto it = given.find(static_cast<int>(i));
    const int64_t size = it == given.end() ? 0 : static_cast<int64_t>(it->second->size());
    if (size != parameter.NumElements()) {
      return absl::InvalidArgumentError(absl::StrCat("initial weights of \"", parameter.name, "\": ", size,
                                                     " elements given, ", parameter.NumElements(), " needed"));
    }
    if (size == 0) continue;
    const Placement& at = plan_.placements()[i];
    std::copy(it->second->begin(), it->second->end(), flat[at.bucket].begin() + at.offset);
  }
  v1::PushHeader header;
  header.set_job(spec_.name);
  header.set_epoch(epoch_.value());
  header.set_content(v1::PushHeader::CONTENT_INITIAL_WEIGHTS);
  header.set_push_id(RandomId());
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    const int shard = plan_.PlaceOf(Rank(rank)).shard;
    header.set_shard(shard);
    std::vector<absl::string_view> parts;
    for (size_t b = 0; b < flat.size(); ++b) {
      const Bucket& bucket = plan_.buckets()[b];
      parts.emplace_back(reinterpret_cast<const char*>(flat[b].data() + bucket.begin(shard)),
                         bucket.size(shard) * sizeof(float));
    }
    RETURN_IF_ERROR(worker(Rank(rank)).Push(header, parts, timeout));
  }
  return absl::OkStatus();
}

int64_t VersionChoice::LowestAt(Epoch of) const {
  if (kind == kAtLeast) return step.value();
  if (kind != kNewer || of > epoch) return 0;
  return of == epoch ? step.value() + 1 : kMaxStep + 1;
}

absl::StatusOr<Version> Job::Pull(VersionChoice choice, absl::Duration timeout, const std::atomic<bool>* stop) {
  v1::PullRequest request;
  request.set_job(spec_.name);
  request.set_epoch(epoch_.value());
  switch (choice.kind) {
    case VersionChoice::kExact:
      request.set_exact(choice.step.value());
      break;
    case VersionChoice::kAtLeast:
    case VersionChoice::kNewer:
      request.set_at_least(choice.LowestAt(epoch_));
      break;
    case VersionChoice::kLatest:
      request.set_latest(true);
      break;
  }
  Version version;
  version.job_ = shared_from_this();
  const auto begin = [&](const v1::PullHeader& header) -> absl::Status {
    if (header.plan_hash() != plan_.hash() || header.total_bytes() != plan_.version_bytes()) {
      return absl::AbortedError(absl::StrCat("the version has plan ", header.plan_hash(), " and ", header.total_bytes(),
                                             " bytes, this client ", plan_.hash(), " and ", plan_.version_bytes(),
                                             ": the job is on another mesh since it was opened; open it again"));
    }
    version.step_ = Step(header.step());
    version.bytes_.reserve(header.total_bytes());
    return absl::OkStatus();
  };
  const auto data = [&](absl::string_view bytes) {
    if (stop != nullptr && stop->load()) return absl::FailedPreconditionError("stopped");
    version.bytes_.insert(version.bytes_.end(), bytes.begin(), bytes.end());
    return absl::OkStatus();
  };
  const Rank rank = reading_rank();
  const absl::Time deadline = MonotonicNow() + timeout;
  const auto pull = [&] {
    version.bytes_.clear();
    return worker(rank).Pull(request, begin, data, deadline - MonotonicNow());
  };
  RETURN_IF_ERROR(CallAgain(*this, rank, std::min(peer_timeout_, timeout), pull).status());
  return version;
}

void Job::AwaitClosed(absl::Duration timeout) const {
  const absl::Time deadline = MonotonicNow() + timeout;
  const auto holds = [&](Rank rank) {
    const absl::Duration limit = TimeOfCall(deadline, options_.call_timeout);
    const absl::StatusOr<v1::GetStatusReply> status = worker(rank).GetStatus(limit);
    return status.ok() && std::any_of(status->jobs().begin(), status->jobs().end(), [&](const auto& job) {
             return job.name() == spec_.name && job.epoch() == epoch_.value();
           });
  };
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    while (MonotonicNow() < deadline && holds(Rank(rank))) Pause(kPollReady);
  }
}

absl::Status Job::RecordCheckpoint(const v1::StoredCheckpoint& checkpoint, absl::Duration timeout) const {
  if (spec_.on_loss != OnLoss::kCheckpoint) return absl::OkStatus();
  v1::RecordCheckpointRequest request;
  request.set_job(spec_.name);
  request.set_uid(uid_);
  request.set_epoch(epoch_.value());
  *request.mutable_checkpoint() = checkpoint;
  return CallAgainWhile(
             [&] { return coordinator_->has_answered(); }, timeout,
             [&] { return coordinator_->RecordCheckpoint(request, std::min(timeout, options_.call_timeout)); })
      .status();
}

std::optional<v1::GoneBack> Job::WentBackSince(Epoch before) const {
  return gone_back_.has_value() && gone_back_->epoch() > before.value() ? gone_back_ : std::nullopt;
}

bool Job::MayComeBack(Rank rank) const { return members_[rank.value()].kept() && !IsOver(); }

// The versions of a job are a small answer. A coordinator that gives none leaves half of the time to the member.
bool Job::IsOver() const {
  if (over_.load()) return true;
  const absl::Duration between = peer_timeout_ / kLooksInATimeout;
  {
    MutexLock lock(look_mu_);
    if (MonotonicNow() < next_look_) return false;
    next_look_ = MonotonicNow() + between;
  }
  v1::ListVersionsRequest request;
  request.set_job(spec_.name);
  const absl::StatusOr<v1::ListVersionsReply> now = coordinator_->ListVersions(request, between / 2);
  if (now.ok() && now->epoch() > epoch_.value()) over_.store(true);
  return over_.load() || absl::IsNotFound(now.status());
}

// A coordinator that was started with another state file knows no such job, or an older epoch: that is no reason to leave
// a member that trains. If the job was deleted, its members say so.
absl::Status Job::CheckNotOver() const {
  IsOver();
  if (!over_.load()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("epoch ", epoch_.value(), " of job ", spec_.name,
                                         " is over, as the coordinator says: open the job again"));
}

absl::StatusOr<std::optional<v1::GetStatusReply::Job>> Job::StatusAt(Rank rank, absl::Duration limit) const {
  const auto ask = [&] { return worker(rank).GetStatus(limit); };
  ASSIGN_OR_RETURN(const v1::GetStatusReply status, CallAgain(*this, rank, peer_timeout_, ask));
  for (const v1::GetStatusReply::Job& entry : status.jobs()) {
    if (entry.name() != spec_.name) continue;
    if (entry.epoch() != epoch_.value()) {
      return absl::AbortedError(absl::StrCat("epoch ", epoch_.value(), " of job ", spec_.name, " is over; now ",
                                             entry.epoch(), ": open the job again"));
    }
    if (!entry.error().empty()) return absl::UnavailableError(entry.error());
    return std::make_optional(entry);
  }
  if (MayComeBack(rank)) return std::optional<v1::GetStatusReply::Job>();
  return absl::UnavailableError(absl::StrCat("worker ", members_[rank.value()].worker(), " does not hold job ",
                                             spec_.name, " any more; open the job again"));
}

// Each host's first worker knows its own.
absl::StatusOr<int> Job::CountTrainers(absl::Duration limit) const {
  int trainers = 0;
  for (int rank = 0; rank < plan_.num_ranks(); ++rank) {
    ASSIGN_OR_RETURN(const std::optional<v1::GetStatusReply::Job> status, StatusAt(Rank(rank), limit));
    if (status.has_value()) trainers += status->trainers_size();
  }
  RETURN_IF_ERROR(CheckNotOver());
  return trainers;
}

Rank Job::reading_rank() const {
  for (int rank = plan_.num_ranks() - 1; rank > 0; --rank) {
    if (members_[rank].alive()) return Rank(rank);
  }
  return Rank(0);
}

absl::StatusOr<v1::DigestReply> Job::Digest(absl::Duration timeout) {
  v1::DigestRequest request;
  request.set_job(spec_.name);
  const absl::Time deadline = MonotonicNow() + timeout;
  return CallAgain(*this, Rank(0), std::min(peer_timeout_, timeout),
                   [&] { return worker(Rank(0)).Digest(request, deadline - MonotonicNow()); });
}

Epoch Version::epoch() const { return job_->epoch(); }

absl::StatusOr<ConstTensorView> Version::parameter(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  const Placement& at = job_->plan().placements()[tensor];
  int64_t before = 0;
  for (int b = 0; b < at.bucket; ++b) before += job_->plan().buckets()[b].weight_bytes;
  return WeightsIn(job_->plan(), tensor, bytes_.data() + before);
}

ConstTensorView WeightsIn(const Plan& plan, int tensor, const char* bucket_begin) {
  const Placement& at = plan.placements()[tensor];
  const Bucket& bucket = plan.buckets()[at.bucket];
  ConstTensorView view{bucket_begin + bucket.CodeOffset(at.offset), bucket.format(), at.num_elements, bucket.gather};
  view.num_scales = at.scales.num_blocks;
  if (view.num_scales > 0) view.scales = bucket_begin + at.scale_offset;
  return view;
}

}  // namespace shardmesh
