// The coordinator's workers: how they join, are heard, fall silent and leave, and what that does to their jobs.
#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

bool SamePlace(const WorkerIdentity& a, const WorkerIdentity& b) {
  return a.host_id == b.host_id && a.address == b.address && a.local_socket == b.local_socket;
}

bool Names(const std::vector<ResumedJob>& resumed, const JobRecord& job, int64_t epoch, int64_t rank) {
  return absl::c_any_of(resumed, [&](const ResumedJob& held) {
    return held.job == job.name && held.epoch == epoch && held.rank == rank && SameSecret(held.secret, job.secret);
  });
}

// Whether the job goes on when the next incarnation of its member takes over, where it supports that.
bool GoesOn(const JobRecord& job, size_t rank, const std::vector<ResumedJob>& resumed) {
  return job.state == JobState::kReady && Names(resumed, job, job.epoch, static_cast<int64_t>(rank));
}

std::string Member(const WorkerIdentity& worker, size_t rank) {
  return absl::StrCat("worker ", worker.name, " (rank ", rank, ", pid ", worker.pid, ")");
}

std::string NameAndIncarnation(const WorkerIdentity& worker) {
  return absl::StrCat("worker=", worker.name, " incarnation=", worker.incarnation);
}

}  // namespace

Worker* Coordinator::FindWorker(const std::string& name) {
  const auto found = state_.workers.find(name);
  return found == state_.workers.end() ? nullptr : &found->second;
}

absl::Status Coordinator::CheckIncarnation(const Worker* worker, const std::string& name, int64_t incarnation) {
  if (worker == nullptr) return absl::NotFoundError(absl::StrCat("worker ", name, " has not joined; join first"));
  const int64_t there = worker->record.identity.incarnation;
  if (incarnation == there) return absl::OkStatus();
  if (incarnation < there) {
    return WithNextIncarnation(
        absl::AbortedError(absl::StrCat("incarnation ", incarnation, " of worker ", name, " is stale: ", there,
                                        " has joined since; join again with a larger one")),
        AddSaturated(there, 1));
  }
  return absl::NotFoundError(
      absl::StrCat("incarnation ", incarnation, " of worker ", name, " has not joined (", there, " has); join first"));
}

absl::Status Coordinator::CheckSecretOf(const Worker* worker, int64_t incarnation, absl::string_view secret,
                                        absl::string_view call) {
  if (worker == nullptr) return absl::OkStatus();
  const WorkerRecord& there = worker->record;
  if (there.identity.incarnation != incarnation || SameSecret(there.secret, secret)) return absl::OkStatus();
  // Should another program have taken the number, the worker goes on with the next one.
  return WithNextIncarnation(absl::PermissionDeniedError(absl::StrCat(
                                 call, " of worker ", there.identity.name, " incarnation ", incarnation,
                                 " without the secret that it joined with; only the process that joined may send it")),
                             AddSaturated(incarnation, 1));
}

// Incarnations may have come and gone that never joined: since the coordinator was away, or they were killed before.
// Who has the memory of a job of `old` through them is its next incarnation all the same: it could be had only after
// that one's death.
bool Coordinator::TakesOver(const LastIncarnation& last, const WorkerIdentity& old) const {
  if (last.resumes <= old.incarnation) return last.resumes == old.incarnation;
  return absl::c_any_of(PlacesOf(old), [&](const Place& place) {
    const JobRecord& job = place.job->record;
    if (place.kind == Place::kOther) {
      return Names(last.resumed, job, job.from_epoch, job.others[place.index].was);
    }
    if (place.kind != Place::kMember) return false;
    return Names(last.resumed, job, job.epoch, place.index) ||
           (job.from_epoch > 0 && Names(last.resumed, job, job.from_epoch, job.members[place.index].was));
  });
}

// An incarnation that says it found the old one dead, or took its memory over, is believed if it is of the same host: a
// worker without a node comes back at once so, before the old incarnation is silent for the time-out
// (docs/security.md).
absl::Status Coordinator::CheckJoin(const Worker& there, const WorkerIdentity& worker, absl::Time now,
                                    const LastIncarnation& last) const {
  const WorkerIdentity& old = there.record.identity;
  if (worker.incarnation < old.incarnation) return CheckIncarnation(&there, worker.name, worker.incarnation);
  if (worker.incarnation == old.incarnation) {
    if (there.record.state == WorkerState::kLeft) {
      return WithNextIncarnation(
          absl::AbortedError(absl::StrCat("incarnation ", worker.incarnation, " of worker ", worker.name,
                                          " has left; join again with a larger one")),
          AddSaturated(worker.incarnation, 1));
    }
    if (worker == old) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat("incarnation ", worker.incarnation, " of worker ", worker.name,
                                                 " has joined with another address, host, socket or pid (pid ", old.pid,
                                                 ", now ", worker.pid, "); take another name or a larger incarnation"));
  }
  if (there.record.state != WorkerState::kAlive || IsSilent(there, now)) return absl::OkStatus();
  const bool ended = last.dead == old.incarnation || TakesOver(last, old);
  if (ended && worker.host_id == old.host_id) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat("worker ", worker.name, " is alive as incarnation ", old.incarnation,
                                               " (pid ", old.pid, "), heard ",
                                               absl::FormatDuration(now - there.last_heartbeat),
                                               " ago; take another name, or repeat this call once that one is ",
                                               "silent for ", absl::FormatDuration(options_.heartbeat_timeout)));
}

// State files of older versions may hold a number that is larger than any that an incarnation could join with after it.
bool Coordinator::IsUsedUp(const Worker& worker, absl::Time now) const {
  return worker.record.identity.incarnation > kMaxIncarnation &&
         (worker.record.state != WorkerState::kAlive || IsSilent(worker, now));
}

// A clock far ahead, or nonsense: were it stored, no other incarnation of the name could join before that time.
absl::Status Coordinator::CheckAhead(const WorkerIdentity& worker, int64_t last, absl::Time wall) const {
  const int64_t most =
      std::max(AddSaturated(last, options_.max_incarnation_step), NextIncarnation(wall + options_.max_ahead, 0));
  if (worker.incarnation <= most) return absl::OkStatus();
  const int64_t next = NextIncarnation(wall, last);
  return WithNextIncarnation(
      absl::AbortedError(absl::StrCat("incarnation ", worker.incarnation, " of worker ", worker.name,
                                      " is too far ahead of this coordinator's clock; at most ", most,
                                      ". Set the clocks right, or join again with ", next)),
      next);
}

absl::Status Coordinator::MakeRoomForWorker(Transaction& transaction) const {
  if (static_cast<int>(state_.workers.size()) < options_.max_workers) return absl::OkStatus();
  const Worker* oldest = nullptr;  // of those that are gone and in no job
  for (const auto& [name, worker] : state_.workers) {
    const WorkerIdentity& identity = worker.record.identity;
    if (worker.record.state == WorkerState::kAlive || !PlacesOf(identity).empty()) continue;
    if (oldest == nullptr || identity.incarnation < oldest->record.identity.incarnation) oldest = &worker;
  }
  if (oldest == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("there are ", state_.workers.size(), " workers, at most ",
                                                     options_.max_workers, "; stop one first"));
  }
  transaction.DeleteWorker(std::string(oldest->record.identity.name));
  return absl::OkStatus();
}

void Coordinator::TakeTraits(Worker& worker, const WorkerTraits& traits) {
  if (!worker.traits.has_value() || !SameForJobs(*worker.traits, traits)) assign_ = true;
  worker.traits = traits;
}

// The next incarnation is there before the jobs of the last one lose that: it may take its place in them, without its
// memory.
void Coordinator::Resume(Transaction& transaction, const Worker& worker, const std::vector<ResumedJob>& resumed,
                         absl::Time now) {
  const WorkerIdentity& next = worker.record.identity;
  const WorkerIdentity last = state_.workers.at(next.name).record.identity;
  int num_jobs = 0;
  for (const Place& place : PlacesOf(last)) {
    if (place.kind != Place::kMember || !GoesOn(place.job->record, place.index, resumed)) continue;
    if (!CheckSupportedNow(*place.job, Feature::kRestart).ok()) continue;
    std::vector<MemberRecord> members = place.job->record.members.ToVector();
    members[place.index].worker = next;
    transaction.MutableJob(place.job->record.name).record.members = std::move(members);
    ++num_jobs;
  }
  const std::vector<std::string> held = TakeOverHeld(transaction, last, next, resumed);
  transaction.Event(absl::StrCat("event=worker_resumed ", NameAndIncarnation(next), " was=", last.incarnation,
                                 " jobs=", num_jobs + held.size(), " pid=", next.pid));
  transaction.PutWorker(worker);
  LoseWorker(transaction, last, "ended", now);
  for (const std::string& name : held) {
    const std::string cause = absl::StrCat("worker ", next.name, " ended, and has what it held");
    const absl::Status formed = ReformJob(transaction, name, kNobody, cause, now);
    if (!formed.ok()) LoseJob(transaction, name, absl::StrCat(cause, "; it cannot re-form: ", formed.message()), now);
  }
}

absl::Status Coordinator::Join(const WorkerIdentity& worker, absl::Time now, const WorkerTraits& traits,
                               const LastIncarnation& last, absl::Time wall, absl::string_view secret) {
  RETURN_IF_ERROR(CheckSecretOf(FindWorker(worker.name), worker.incarnation, secret, "join"));
  Transaction transaction = NewTransaction();
  const Worker joins = {{worker, WorkerState::kAlive, std::string(secret)}, now, traits};
  const auto found = state_.workers.find(worker.name);
  if (found == state_.workers.end() || IsUsedUp(found->second, now)) {
    RETURN_IF_ERROR(CheckAhead(worker, 0, wall));
    RETURN_IF_ERROR(MakeRoomForWorker(transaction));
  } else {
    RETURN_IF_ERROR(CheckJoin(found->second, worker, now, last));
    RETURN_IF_ERROR(CheckAhead(worker, found->second.record.identity.incarnation, wall));
    const WorkerRecord& there = found->second.record;
    if (there.identity.incarnation == worker.incarnation && there.state == WorkerState::kAlive) {
      Hear(found->second, now);
      TakeTraits(found->second, traits);
      AssignWaitingJobs(transaction, now);
      return Commit(transaction);
    }
    last_come_ = now;
    if (there.state == WorkerState::kAlive && TakesOver(last, there.identity) && SamePlace(worker, there.identity)) {
      Resume(transaction, joins, last.resumed, now);
      assign_ = true;
      AssignWaitingJobs(transaction, now);
      return Commit(transaction);
    }
  }
  last_come_ = now;
  PutNextIncarnation(transaction, joins, now);
  transaction.Event(absl::StrCat("event=worker_joined ", NameAndIncarnation(worker), " pid=", worker.pid, " host=\"",
                                 absl::CHexEscape(worker.host_id), "\" address=\"", absl::CHexEscape(worker.address),
                                 "\""));
  assign_ = true;
  AssignWaitingJobs(transaction, now);
  return Commit(transaction);
}

absl::StatusOr<std::vector<Assignment>> Coordinator::Heartbeat(const std::string& name, int64_t incarnation,
                                                               const std::vector<MemberReport>& reports, absl::Time now,
                                                               const WorkerTraits& traits, absl::string_view secret) {
  Worker* const there = FindWorker(name);
  RETURN_IF_ERROR(CheckSecretOf(there, incarnation, secret, "heartbeat"));
  const absl::Status known = CheckIncarnation(there, name, incarnation);
  if (absl::IsNotFound(known)) RETURN_IF_ERROR(CheckJobsKnown(name, incarnation, false, reports));
  RETURN_IF_ERROR(known);
  Worker& worker = *there;
  const WorkerIdentity& identity = worker.record.identity;
  if (worker.record.state == WorkerState::kLeft) return CheckJoin(worker, identity, now, {});
  RETURN_IF_ERROR(CheckRanks(reports, identity));
  const bool doubted = worker.doubted;
  Hear(worker, now);
  worker.heard = ++state_.heard;
  TakeTraits(worker, traits);

  Transaction transaction = NewTransaction();
  if (doubted) FormAgain(transaction, identity, now);
  if (worker.record.state == WorkerState::kDead) {
    transaction.MutableWorker(name).record.state = WorkerState::kAlive;
    transaction.Event(absl::StrCat("event=worker_heard_again ", NameAndIncarnation(identity)));
    assign_ = true;
  }
  absl::Status first_error = CheckJobsKnown(name, incarnation, true, reports);
  for (const MemberReport& report : reports) first_error.Update(ApplyReport(transaction, report, identity, now));
  AssignWaitingJobs(transaction, now);
  RETURN_IF_ERROR(Commit(transaction));
  for (const MemberReport& report : reports) ApplyProgress(report, identity, now);
  if (!first_error.ok()) return first_error;
  return AssignmentsOf(identity, now);
}

// A report that failed is decided on later, and one of fewer steps than are known is believed after a time-out. Who goes
// back to a checkpoint is told by the time who has copies.
std::optional<Coordinator::Heard> Coordinator::MayRepeat(const std::string& name,
                                                         const std::vector<MemberReport>& reports,
                                                         const std::vector<Assignment>& told) {
  Worker* const worker = FindWorker(name);
  const bool ready = absl::c_all_of(reports, [&](const MemberReport& report) {
    if (report.state != MemberReport::State::kReady) return false;
    const auto job = state_.jobs.find(report.job);
    return job == state_.jobs.end() || !job->second.behind.has_value();
  });
  const bool goes_back = absl::c_any_of(told, [](const Assignment& assignment) { return assignment.back.has_value(); });
  if (!ready || goes_back || worker == nullptr) return std::nullopt;
  return Heard{state_.changes, worker->heard, worker, worker->record.identity.incarnation, !reports.empty()};
}

bool Coordinator::HearAgain(const Heard& last, absl::Time now) {
  if (last.worker == nullptr || last.changes != state_.changes || !IsAsAt(*last.worker, last, now)) return false;
  last.worker->last_heartbeat = now;
  return true;
}

// No other heartbeat of it came since, and it counts as alive.
bool Coordinator::IsAsAt(const Worker& worker, const Heard& last, absl::Time now) const {
  return worker.record.identity.incarnation == last.incarnation && worker.heard == last.number &&
         worker.record.state == WorkerState::kAlive && !worker.doubted && !IsSilent(worker, now);
}

absl::Status Coordinator::Leave(const std::string& name, int64_t incarnation, absl::Time now,
                                absl::string_view secret) {
  const Worker* const there = FindWorker(name);
  RETURN_IF_ERROR(CheckSecretOf(there, incarnation, secret, "leave"));
  RETURN_IF_ERROR(CheckIncarnation(there, name, incarnation));
  if (there->record.state == WorkerState::kLeft) return absl::OkStatus();
  Transaction transaction = NewTransaction();
  WorkerRecord& record = transaction.MutableWorker(name).record;
  record.state = WorkerState::kLeft;
  transaction.Event(absl::StrCat("event=worker_left ", NameAndIncarnation(record.identity)));
  LoseWorker(transaction, record.identity, "left", now, /*died=*/false);
  AssignWaitingJobs(transaction, now);
  return Commit(transaction);
}

void Coordinator::LoseWorker(Transaction& transaction, const WorkerIdentity& worker, const std::string& cause,
                             absl::Time now, bool died) {
  LoseFromReshards(transaction, worker, absl::StrCat("worker ", worker.name, " (pid ", worker.pid, ") ", cause));
  LoseDeparting(transaction, worker, cause, now);
  for (const Place& place : PlacesOf(worker)) {
    if (place.kind != Place::kMember) continue;
    LoseMember(transaction, place.job->record.name, place.index,
               absl::StrCat(Member(worker, place.index), " ", cause), now, died);
  }
}

Coordinator::Ending Coordinator::SilenceOf(const Worker& worker, absl::Time now) const {
  const std::string silence = absl::FormatDuration(now - worker.last_heartbeat);
  return {absl::StrCat("was silent for ", silence, ", longer than ", absl::FormatDuration(options_.heartbeat_timeout)),
          absl::StrCat("silent_for=", silence)};
}

void Coordinator::MarkDead(Transaction& transaction, const std::map<std::string, Ending>& workers, absl::Time now) {
  for (const auto& [name, ending] : workers) {
    WorkerRecord& record = transaction.MutableWorker(name).record;
    record.state = WorkerState::kDead;
    transaction.Event(absl::StrCat("event=worker_dead ", NameAndIncarnation(record.identity), " ", ending.seen));
  }
  for (const auto& [name, ending] : workers) {
    LoseWorker(transaction, state_.workers.at(name).record.identity, ending.cause, now);
  }
}

// As Resume: the next incarnation comes first.
void Coordinator::PutNextIncarnation(Transaction& transaction, const Worker& worker, absl::Time now) {
  const auto found = state_.workers.find(worker.record.identity.name);
  const std::optional<Worker> last = found == state_.workers.end() ? std::nullopt : std::make_optional(found->second);
  transaction.PutWorker(worker);
  if (!last.has_value() || last->record.state != WorkerState::kAlive) return;
  const Ending ending = IsSilent(*last, now) ? SilenceOf(*last, now) : Ending{"ended", "found_by=its_next_incarnation"};
  transaction.Event(absl::StrCat("event=worker_dead ", NameAndIncarnation(last->record.identity), " ", ending.seen));
  LoseWorker(transaction, last->record.identity, ending.cause, now);
}

Coordinator::Places Coordinator::PlacesOf(const WorkerIdentity& worker) const {
  Places own;
  for (const Place& place : state_.places.Of(state_.jobs, worker.name)) {
    if (place.incarnation == worker.incarnation) own.push_back(place);
  }
  return own;
}

Place Coordinator::PlaceIn(const MemberReport& report, const WorkerIdentity& worker) const {
  const std::vector<Place>& places = state_.places.Of(state_.jobs, worker.name);
  auto place = std::lower_bound(
      places.begin(), places.end(), report.job,
      [](const Place& before, const std::string& job) { return before.job->record.name < job; });
  for (; place != places.end() && place->kind == Place::kMember && place->job->record.name == report.job; ++place) {
    if (place->incarnation == worker.incarnation && place->job->record.epoch == report.epoch) return *place;
  }
  return {};
}

absl::Status Coordinator::CheckRanks(const std::vector<MemberReport>& reports, const WorkerIdentity& worker) const {
  for (const MemberReport& report : reports) {
    const Place place = PlaceIn(report, worker);
    if (place.job == nullptr || report.rank == place.index) continue;
    return absl::InvalidArgumentError(absl::StrCat("worker ", worker.name, " reports rank ", report.rank, " of job ",
                                                   report.job, " at epoch ", report.epoch, "; it is rank ",
                                                   place.index));
  }
  return absl::OkStatus();
}

// Every epoch that this store ever gave is at most its job's, or the floor that deletions leave; and a worker that
// holds a job has joined. So a job beyond that is of another store, and closing it would end a training that nobody
// deleted.
absl::Status Coordinator::CheckJobsKnown(const std::string& name, int64_t incarnation, bool joined,
                                         const std::vector<MemberReport>& reports) {
  for (const MemberReport& report : reports) {
    const auto found = state_.jobs.find(report.job);
    const int64_t last = found == state_.jobs.end() ? 0 : found->second.record.epoch;
    if (joined && report.epoch <= std::max(last, state_.epoch_floor)) continue;
    const std::string error = absl::StrCat(
        "worker ", name, " holds job ", report.job, " (epoch ", report.epoch,
        "), which was never made in this coordinator's state file: it is not the file that the job is in. The worker ",
        "keeps the job. Start the coordinator with that file, or restart the worker to give the job up");
    if (static_cast<int>(foreign_.size()) < options_.max_workers &&
        foreign_.insert(absl::StrCat(name, "@", incarnation)).second) {
      events_.push_back(absl::StrCat("event=other_state_file worker=", name, " incarnation=", incarnation,
                                     " job=", report.job, " error=\"", error, "\""));
    }
    return absl::FailedPreconditionError(error);
  }
  return absl::OkStatus();
}

// Who is lost by what a peer says may still be heard of, until it is silent for the time-out. It gets no new jobs
// until it is heard again: a dead one would have this one assigned to it once more.
void Coordinator::ApplyFailure(Transaction& transaction, const MemberReport& report, const Job& job,
                               const WorkerIdentity& worker, absl::Time now) {
  const SharedList<MemberRecord> members = job.record.members;
  if (report.lost_rank < 0 || report.lost_rank >= static_cast<int32_t>(members.size())) {
    if (job.record.goes_back && report.unreadable) return ApplyRead(transaction, report, job, worker, now);
    const std::string cause = absl::StrCat(Member(worker, report.rank), " failed: ", report.error);
    const bool reforms =
        job.record.state == JobState::kPreparing && (job.record.from_epoch > 0 || job.record.goes_back);
    if (!reforms) return FailJob(transaction, report.job, cause);
    // It cannot take its place, or has not enough memory for it: the others may do without.
    const std::string incarnation = absl::StrCat(worker.name, "@", worker.incarnation);
    transaction.MutableJob(report.job).record.excluded.push_back(incarnation);
    return LoseMember(transaction, report.job, report.rank, cause, now);
  }
  if (AwaitsHost(transaction, report, worker, now)) return;  // it is said again with the next heartbeat
  const MemberRecord lost = members[report.lost_rank];
  const std::string cause = absl::StrCat(Member(lost.worker, report.lost_rank), " is lost, as ",
                                         Member(worker, report.rank), " says: ", report.error);
  const bool prepared = job.record.state == JobState::kPreparing;
  LoseMember(transaction, report.job, report.lost_rank, cause, now);
  const bool goes_on = prepared || job.record.state == JobState::kPreparing || job.record.goes_back;
  if (goes_on && WorkerOf(lost) != nullptr) transaction.MutableWorker(lost.worker.name).doubted = true;
}

// What a job that re-forms has must not be lost without a word.
absl::Status Coordinator::ApplyOtherPlan(Transaction& transaction, const MemberReport& report, const Job& there,
                                         const WorkerIdentity& worker) {
  const std::string& hash = there.definition->plan().hash();
  if (there.record.state == JobState::kPreparing && there.record.from_epoch > 0) {
    FailJob(transaction, report.job,
            absl::StrCat(Member(worker, report.rank), " computed plan hash ", report.plan_hash,
                         " while the job re-formed, the coordinator ", hash));
  } else if (there.record.state == JobState::kPreparing) {
    JobRecord& job = transaction.MutableJob(report.job).record;
    job.excluded.push_back(absl::StrCat(worker.name, "@", worker.incarnation));
    transaction.Event(absl::StrCat("event=plan_differs job=", report.job, " ", NameAndIncarnation(worker),
                                   " epoch=", job.epoch, " theirs=", report.plan_hash, " ours=", hash));
    Unassign(transaction, report.job);
  }
  return absl::FailedPreconditionError(absl::StrCat("worker ", worker.name, " computed plan hash ", report.plan_hash,
                                                    " for job ", report.job, ", the coordinator ", hash,
                                                    "; both must be of the same version of shardmesh"));
}

absl::Status Coordinator::ApplyReport(Transaction& transaction, const MemberReport& report,
                                      const WorkerIdentity& worker, absl::Time now) {
  if (ApplyStaged(transaction, report, worker)) return absl::OkStatus();
  const Job* there = PlaceIn(report, worker).job;
  if (there == nullptr) {
    const bool failed = report.state == MemberReport::State::kFailed;
    if (failed) LoseDeparted(transaction, report, worker, now);
    return absl::OkStatus();
  }
  if (!report.plan_hash.empty() && report.plan_hash != there->definition->plan().hash()) {
    return ApplyOtherPlan(transaction, report, *there, worker);
  }
  if (report.state == MemberReport::State::kFailed) {
    if (report.committed_step > there->record.committed_step) {  // the error of the job names it
      Job& job = transaction.MutableJob(report.job);
      job.record.committed_step = report.committed_step;
      job.behind.reset();
      job.lost_members = 0;
    }
    ApplyFailure(transaction, report, *there, worker, now);
    return absl::OkStatus();
  }
  if (there->record.goes_back && report.loaded_digest.has_value()) ApplyRead(transaction, report, *there, worker, now);
  if (report.state == MemberReport::State::kReady && there->record.state == JobState::kPreparing) {
    const size_t ranks = there->record.members.size();
    const bool last = there->ready.AllBut(report.epoch, ranks, report.rank);
    Job& job = last ? transaction.MutableJob(report.job) : state_.jobs.at(report.job);
    job.ready.Add(report.epoch, ranks, report.rank);
    if (last) MakeReady(transaction, report.job);
  }
  return absl::OkStatus();
}

// A report of fewer steps came late, and one of more follows. If none does for a time-out, what is known is wrong.
void Coordinator::ApplyProgress(const MemberReport& report, const WorkerIdentity& worker, absl::Time now) {
  const Job* const there = report.rank == 0 ? PlaceIn(report, worker).job : nullptr;
  if (there == nullptr || there->record.goes_back) return;  // its step is the checkpoint's until it is READY
  Job& job = state_.jobs.at(report.job);
  if (report.committed_step < job.record.committed_step) {
    const bool same =
        job.behind.has_value() && job.behind->epoch == report.epoch && job.behind->incarnation == worker.incarnation;
    if (!same) job.behind = Behind{now, report.epoch, worker.incarnation};
    if (now - job.behind->since < options_.heartbeat_timeout) return;
  }
  job.behind.reset();
  if (report.committed_step == job.record.committed_step && report.published_steps == job.record.published_steps)
    return;
  if (report.committed_step > job.record.committed_step) job.lost_members = 0;
  job.record.committed_step = report.committed_step;
  job.record.published_steps = report.published_steps;
  job.progress_unsaved = true;
}

std::vector<Assignment> Coordinator::AssignmentsOf(const WorkerIdentity& worker, absl::Time now) const {
  std::vector<Assignment> assignments;
  for (const Place& place : PlacesOf(worker)) {
    const Job& job = *place.job;
    const JobRecord& record = job.record;
    if (place.kind == Place::kMember) {
      const Told& told = state_.places.ToldOf(state_.jobs, job);
      assignments.push_back({job.definition, record.epoch, place.index, told.peers, OriginOf(job)});
      if (record.goes_back) {
        const CheckpointRecord& checkpoint = record.gone_back.checkpoint;
        assignments.back().back = checkpoint;
        if (checkpoint.copied_at > 0) assignments.back().copies = CopiesOf(job, checkpoint, now);
        assignments.back().use = job.read.AllSaid(record.epoch);
      }
    } else if (place.kind == Place::kOther) {
      const Told& told = state_.places.ToldOf(state_.jobs, job);
      assignments.push_back({job.definition,
                             record.from_epoch,
                             record.others[place.index].was,
                             told.peers,
                             {record.from_epoch, record.from_mesh, told.was, record.others}});
    } else {
      assignments.push_back(StagedAt(place));
    }
    assignments.back().secret = record.secret;
  }
  return assignments;
}

}  // namespace shardmesh
