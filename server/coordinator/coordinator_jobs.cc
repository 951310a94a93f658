// The coordinator's jobs: made, described, assigned, failed, deleted.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/mesh/reform.h"
#include "server/coordinator/coordinator.h"
#include "server/seats/assignment.h"

namespace shardmesh {
namespace {

constexpr size_t kNamesListed = 10;

Demand DemandOf(const JobDefinition& definition) {
  return {definition.plan().num_ranks(), HostCounts(definition.spec().mesh, definition.spec().copies),
          definition.refusals()};
}

}  // namespace

std::string Coordinator::IsAnother(const JobRecord& job, int64_t uid) {
  return absl::StrCat("job ", job.name, " has uid ", job.uid, ", not ", uid,
                      ": that one was deleted, and somebody made another of its name");
}

absl::StatusOr<bool> Coordinator::CreateJob(std::shared_ptr<const JobDefinition> definition, absl::Time now,
                                            int64_t uid, int64_t replaces) {
  const std::string& name = definition->spec().name;
  const auto found = state_.jobs.find(name);
  const bool there = found != state_.jobs.end();
  if (there && uid != 0 && found->second.record.uid == uid) return true;
  if (replaces != 0 && !there) return NoSuchJob(name);
  if (replaces != 0 && found->second.record.uid != replaces) {
    return absl::AbortedError(IsAnother(found->second.record, replaces));
  }
  if (replaces == 0 && there) {
    const std::string difference = Difference(found->second.defined->spec(), definition->spec());
    if (difference.empty()) return false;
    return absl::AlreadyExistsError(absl::StrCat("job ", name, " is there with another specification: ", difference,
                                                 "; use another name, or delete that job"));
  }
  if (!there && static_cast<int>(state_.jobs.size()) >= options_.max_jobs) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", state_.jobs.size(), " jobs, at most ", options_.max_jobs, "; delete one first"));
  }
  Transaction transaction = NewTransaction();
  if (there) {
    transaction.DeleteJob(name);
    transaction.Event(absl::StrCat("event=job_replaced job=", name, " uid=", replaces, " by=", uid));
  }
  Job job;
  job.record.name = name;
  job.record.uid = uid;
  job.record.secret = options_.new_secret();
  job.defined = definition;
  job.definition = std::move(definition);
  transaction.Event(absl::StrCat("event=job_created job=", name, " plan_hash=", job.definition->plan().hash()));
  transaction.PutJob(std::move(job));
  assign_ = true;
  AssignWaitingJobs(transaction, now);
  RETURN_IF_ERROR(Commit(transaction));
  return true;
}

absl::StatusOr<JobView> Coordinator::DescribeJob(const std::string& name, absl::Time now) const {
  const auto found = state_.jobs.find(name);
  if (found == state_.jobs.end()) return NoSuchJob(name);
  return View(found->second, now);
}

std::vector<JobView> Coordinator::ListJobs(absl::Time now) const {
  std::vector<JobView> views;
  views.reserve(state_.jobs.size());
  for (const auto& [name, job] : state_.jobs) views.push_back(View(job, now));
  return views;
}

absl::Status Coordinator::DeleteJob(const std::string& name, absl::Time now, int64_t uid) {
  const auto found = state_.jobs.find(name);
  if (found == state_.jobs.end()) return NoSuchJob(name);
  if (uid != 0 && found->second.record.uid != uid) return absl::NotFoundError(IsAnother(found->second.record, uid));
  Transaction transaction = NewTransaction();
  transaction.DeleteJob(name);
  transaction.Event(absl::StrCat("event=job_deleted job=", name));
  return Commit(transaction);
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> Coordinator::Definition(const std::string& name) const {
  const auto found = state_.jobs.find(name);
  if (found == state_.jobs.end()) return NoSuchJob(name);
  return found->second.definition;
}

absl::Status Coordinator::NoSuchJob(const std::string& name) const {
  if (state_.jobs.empty()) return absl::NotFoundError(absl::StrCat("no job ", name, "; there are no jobs"));
  std::vector<std::string> names;
  for (const auto& [there, job] : state_.jobs) {
    if (names.size() == kNamesListed) break;
    names.push_back(there);
  }
  const size_t more = state_.jobs.size() - names.size();
  return absl::NotFoundError(absl::StrCat("no job ", name, "; there are: ", absl::StrJoin(names, ", "),
                                          more == 0 ? "" : absl::StrCat(" and ", more, " more")));
}

JobView Coordinator::View(const Job& job, absl::Time now) const {
  JobView view;
  view.definition = job.definition;
  view.heartbeat_timeout = options_.heartbeat_timeout;
  view.uid = job.record.uid;
  view.state = job.record.state;
  view.epoch = job.record.epoch;
  view.from_epoch = job.record.from_epoch;
  view.committed_step = job.record.committed_step;
  view.published_steps = job.record.published_steps;
  view.error = job.record.error;
  view.next = job.next;
  view.reshard_error = job.reshard_error;
  view.checkpoints = job.record.checkpoints;
  view.gone_back = job.record.gone_back;
  const std::optional<CopiesPlace> copies = FindCopies(job, now, CopyHolders::kCertain, /*times=*/2);
  if (copies.has_value()) view.copied = copies->checkpoint;
  const bool keepable = CheckSupportedNow(job, Feature::kRestart).ok();
  for (size_t rank = 0; rank < job.record.members.size(); ++rank) {
    const MemberRecord& member = job.record.members[rank];
    const bool ready = member.ready || job.ready.Has(job.record.epoch, rank);
    const auto found = state_.workers.find(member.worker.name);
    const bool there = found != state_.workers.end() && found->second.record.state == WorkerState::kAlive &&
                       found->second.record.identity.incarnation == member.worker.incarnation;
    const std::optional<WorkerTraits> traits = there ? found->second.traits : std::nullopt;
    const bool retained = keepable && traits.has_value() && traits->retained;
    view.members.push_back({member.worker, there && !IsSilent(found->second, now), ready, retained});
  }
  if (job.awaits_incarnation)
    view.waiting_for = "the next incarnation of a worker that has a shard which nobody else has";
  if (view.state == JobState::kWaiting) {
    view.waiting_for = ChooseMembers(DemandOf(*job.definition), Candidates(job.record, now)).waiting_for;
  }
  return view;
}

int64_t Coordinator::MostLiveWorkers(absl::Time now) const {
  std::map<std::pair<std::string, bool>, int64_t> count;
  int64_t most = 0;
  for (const auto& [name, worker] : state_.workers) {
    if (worker.record.state != WorkerState::kAlive || IsSilent(worker, now)) continue;
    const bool device = worker.traits.has_value() && worker.traits->has_device;
    most = std::max(most, ++count[{worker.record.identity.host_id, device}]);
  }
  return most;
}

std::vector<Candidate> Coordinator::Candidates(const JobRecord& job, absl::Time now) const {
  std::vector<Candidate> candidates;
  for (const auto& [name, worker] : state_.workers) {
    const WorkerIdentity& identity = worker.record.identity;
    if (!IsThere(worker, now) || !worker.traits.has_value()) continue;
    if (!job.excluded.empty() && absl::c_linear_search(job.excluded, absl::StrCat(name, "@", identity.incarnation))) {
      continue;
    }
    const auto serves = absl::c_count_if(PlacesOf(identity), [](const Place& p) { return p.kind == Place::kMember; });
    candidates.push_back({&identity, static_cast<int>(serves), *worker.traits});
  }
  return candidates;
}

void Coordinator::AssignWaitingJobs(Transaction& transaction, absl::Time now) {
  if (!assign_) return;
  assign_ = false;
  for (const auto& [name, waiting] : state_.jobs) {
    if (waiting.record.state != JobState::kWaiting) continue;
    // A mesh that was valid once is.
    if (waiting.record.goes_back) FitToWorkers(transaction, name, now).IgnoreError();
    const Demand demand = DemandOf(*waiting.definition);
    if (static_cast<int64_t>(state_.workers.size()) < demand.num_ranks) continue;  // of a large fleet the first come
    const Choice choice = ChooseMembers(demand, Candidates(waiting.record, now));
    if (choice.members.empty()) continue;
    transaction.MutableJob(name).assigned_at = now;
    JobRecord& job = transaction.MutableJob(name).record;
    job.state = JobState::kPreparing;
    job.epoch = NextEpoch(job);
    if (job.secret.empty()) job.secret = options_.new_secret();  // an older version made it
    std::vector<MemberRecord> members;
    members.reserve(choice.members.size());
    for (const WorkerIdentity& worker : choice.members) members.push_back({worker, false});
    job.members = std::move(members);
    transaction.Event(absl::StrCat(
        "event=job_assigned job=", name, " epoch=", job.epoch, " workers=",
        absl::StrJoin(choice.members, ",",
                      [](std::string* out, const WorkerIdentity& worker) { absl::StrAppend(out, worker.name); }),
        " on=", choice.on_devices ? "devices" : "processors",
        choice.passed_over > 0
            ? absl::StrCat(" passed_over=", choice.passed_over, " because=\"",
                           absl::CHexEscape(waiting.definition->refusals()[static_cast<int>(TopologyKind::kHostCuda)]),
                           "\"")
            : ""));
  }
}

int64_t Coordinator::NextEpoch(const JobRecord& job) const { return std::max(job.epoch, state_.epoch_floor) + 1; }

void Coordinator::FailJob(Transaction& transaction, const std::string& name, const std::string& cause) {
  JobRecord& job = transaction.MutableJob(name).record;
  if (job.state != JobState::kPreparing && job.state != JobState::kReady) return;  // the first cause is kept
  GiveUpReshard(transaction, name, cause);
  transaction.MutableJob(name).awaits_incarnation = false;
  job.goes_back = false;
  job.state = JobState::kFailed;
  const std::string step =
      job.committed_step < 0 ? "no step of it is known" : absl::StrCat("its newest known step is ", job.committed_step);
  job.error = absl::StrCat(cause, "; ", step, "; delete it, and restore its newest checkpoint or create it again");
  transaction.Event(absl::StrCat("event=job_failed job=", name, " epoch=", job.epoch, " step=", job.committed_step,
                                 " cause=\"", absl::CHexEscape(cause), "\""));
}

void Coordinator::Unassign(Transaction& transaction, const std::string& name) {
  JobRecord& job = transaction.MutableJob(name).record;
  job.state = JobState::kWaiting;
  job.members.clear();
  assign_ = true;
}

// A first preparation has nothing that could be lost, since trainers come to a job once it is READY. But weights that
// somebody placed all the same are not dropped without a word.
void Coordinator::LoseMember(Transaction& transaction, const std::string& name, size_t rank, const std::string& cause,
                             absl::Time now, bool died) {
  const JobRecord& record = state_.jobs.at(name).record;
  const bool prepares = record.state == JobState::kPreparing && record.from_epoch == 0;
  if (record.state == JobState::kFailed || (prepares && record.committed_step >= 0 && !record.goes_back)) {
    return FailJob(transaction, name, cause);
  }
  GiveUpReshard(transaction, name, cause);
  const bool awaits = AwaitsIncarnation(state_.jobs.at(name), rank, now);
  Job& job = transaction.MutableJob(name);
  if (awaits && job.awaits_incarnation) return;
  job.lost_members += died;
  if (job.lost_members > options_.max_lost_members) {
    return FailJob(transaction, name,
                   absl::StrCat(cause, "; before it the job lost ", options_.max_lost_members, " members ",
                                prepares ? "while it was being prepared" : "without a step between them",
                                ", which it may be the cause of: see their logs"));
  }
  if (awaits) {
    job.awaits_incarnation = true;
    transaction.Event(absl::StrCat("event=job_awaits job=", name, " epoch=", record.epoch, " worker=",
                                   record.members[rank].worker.name, " cause=\"", absl::CHexEscape(cause), "\""));
    return;
  }
  if (!prepares) {
    const absl::Status reformed = ReformJob(transaction, name, rank, cause, now);
    if (reformed.ok()) return;
    return LoseJob(transaction, name, absl::StrCat(cause, "; it cannot re-form: ", reformed.message()), now);
  }
  transaction.Event(absl::StrCat("event=job_unassigned job=", name, " epoch=", record.epoch, " cause=\"",
                                 absl::CHexEscape(cause), "\""));
  Unassign(transaction, name);
}

}  // namespace shardmesh
