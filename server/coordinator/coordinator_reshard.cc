// Jobs that are brought to another mesh while they train.
#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

std::string NamesOf(const std::vector<MemberRecord>& members) {
  return absl::StrJoin(members, ",",
                       [](std::string* out, const MemberRecord& member) { absl::StrAppend(out, member.worker.name); });
}

template <typename Members>
auto FindIncarnation(Members& members, const WorkerIdentity& worker) {
  return absl::c_find_if(members, [&](const MemberRecord& member) { return SameIncarnation(member.worker, worker); });
}

bool IsReady(const MemberRecord& member) { return member.ready; }

}  // namespace

absl::Status Coordinator::CheckReshards(const Job& job, const MeshSpec& mesh, absl::Time now) const {
  const JobRecord& record = job.record;
  if (job.next != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", record.name, " is on its way to mesh ", job.next->definition->spec().mesh.ToString(),
                     " already; wait until it is there, or call that off: reshard it to the mesh that it has, ",
                     job.definition->spec().mesh.ToString()));
  }
  if (record.state == JobState::kFailed) {
    return absl::FailedPreconditionError(absl::StrCat("job ", record.name, " failed: ", record.error));
  }
  if (record.state != JobState::kReady) {
    return absl::UnavailableError(
        absl::StrCat("job ", record.name, " is ", JobStateName(record.state), "; reshard it when it is ready"));
  }
  RETURN_IF_ERROR(CheckSupportedNow(job, Feature::kReshard));
  RETURN_IF_ERROR(mesh.Validate());
  if (mesh.NumRanks() > kMaxHostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh ", mesh.ToString(), " has ", mesh.NumRanks(), " ranks; a job has at most ", kMaxHostRanks));
  }
  for (const MemberRecord& member : record.members) {
    const Worker* worker = WorkerOf(member);
    if (worker != nullptr && IsThere(*worker, now)) continue;
    return absl::UnavailableError(absl::StrCat("worker ", member.worker.name, " of job ", record.name,
                                               " does not answer; reshard it when that is there again"));
  }
  return absl::OkStatus();
}

absl::Status Coordinator::Reshard(const std::string& name, const MeshSpec& mesh, absl::Time now) {
  const auto found = state_.jobs.find(name);
  if (found == state_.jobs.end()) return NoSuchJob(name);
  const Job& there = found->second;
  Transaction transaction = NewTransaction();
  const bool has_it = there.definition->spec().mesh == mesh;
  if (there.next != nullptr ? there.next->definition->spec().mesh == mesh
                            : has_it && there.record.state == JobState::kReady) {
    return absl::OkStatus();
  }
  if (has_it && there.next != nullptr) {
    GiveUpReshard(transaction, name, "it was called off");
    return Commit(transaction);
  }
  RETURN_IF_ERROR(CheckReshards(there, mesh, now));
  absl::StatusOr<Reformed> formed = FormOn(mesh, PoolOf(there, kNobody, /*moves=*/true, now));
  const bool unheard = absl::c_any_of(state_.workers, [](const auto& named) {
    return named.second.record.state == WorkerState::kAlive && !named.second.traits.has_value();
  });
  if (!formed.ok() && unheard) {
    return absl::UnavailableError(
        absl::StrCat("this coordinator has not heard of all workers yet; later: ", formed.status().message()));
  }
  if (!formed.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", name, " stays on its mesh: ", formed.status().message(),
                                                      "; start more, or take a smaller mesh"));
  }
  auto next = std::make_shared<NextMesh>();
  ASSIGN_OR_RETURN(next->definition, WithMesh(there.defined, mesh));
  next->epoch = NextEpoch(there.record);
  next->members = std::move(formed->members);
  next->departing = std::move(formed->others);
  next->since = now;
  transaction.UseUpEpoch(next->epoch);
  transaction.Event(absl::StrCat("event=reshard_begins job=", name, " epoch=", next->epoch,
                                 " from_epoch=", there.record.epoch, " mesh=", mesh.ToString(),
                                 " workers=", NamesOf(next->members), " leave=", NamesOf(next->departing)));
  Job& job = transaction.MutableJob(name);
  job.reshard_error.clear();
  job.next = std::move(next);
  return Commit(transaction);
}

void Coordinator::GiveUpReshard(Transaction& transaction, const std::string& name, const std::string& cause) {
  if (state_.jobs.at(name).next == nullptr) return;
  Job& job = transaction.MutableJob(name);
  transaction.Event(absl::StrCat("event=reshard_given_up job=", name, " epoch=", job.next->epoch,
                                 " mesh=", job.next->definition->spec().mesh.ToString(), " cause=\"",
                                 absl::CHexEscape(cause), "\""));
  job.reshard_error = cause;
  job.next = nullptr;
}

void Coordinator::LoseFromReshards(Transaction& transaction, const WorkerIdentity& worker, const std::string& cause) {
  for (const Place& place : PlacesOf(worker)) {
    const bool takes_part = place.kind == Place::kNext || place.kind == Place::kDeparting;
    if (takes_part) GiveUpReshard(transaction, place.job->record.name, cause);
  }
}

bool Coordinator::ApplyStaged(Transaction& transaction, const MemberReport& report, const WorkerIdentity& worker) {
  const auto found = state_.jobs.find(report.job);
  if (found == state_.jobs.end() || found->second.next == nullptr || found->second.next->epoch != report.epoch) {
    return false;
  }
  const auto next = std::make_shared<NextMesh>(*found->second.next);
  const bool takes_part = FindIncarnation(next->members, worker) != next->members.end() ||
                          FindIncarnation(next->departing, worker) != next->departing.end();
  if (!takes_part) return true;
  const std::string who = absl::StrCat("worker ", worker.name, " (pid ", worker.pid, ")");
  const std::string& hash = next->definition->plan().hash();
  if (report.state == MemberReport::State::kFailed) {
    GiveUpReshard(transaction, report.job, absl::StrCat(who, " failed: ", report.error));
  } else if (!report.plan_hash.empty() && report.plan_hash != hash) {
    GiveUpReshard(transaction, report.job,
                  absl::StrCat(who, " computed plan hash ", report.plan_hash, ", the coordinator ", hash));
  } else if (report.state == MemberReport::State::kPrepared) {
    for (std::vector<MemberRecord>* all : {&next->members, &next->departing}) {
      if (const auto member = FindIncarnation(*all, worker); member != all->end()) member->ready = true;
    }
    const bool all_are = absl::c_all_of(next->members, IsReady) && absl::c_all_of(next->departing, IsReady);
    transaction.MutableJob(report.job).next = next;
    if (all_are) MoveToNext(transaction, report.job);
  }
  return true;
}

// Nobody ends the present epoch before this is stored.
void Coordinator::MoveToNext(Transaction& transaction, const std::string& name) {
  Job& job = transaction.MutableJob(name);
  const std::shared_ptr<const NextMesh> next = std::exchange(job.next, nullptr);
  JobRecord& record = job.record;
  record.from_epoch = record.epoch;
  record.from_mesh = job.definition->spec().mesh.ToString();
  record.state = JobState::kPreparing;
  record.epoch = next->epoch;
  std::vector<MemberRecord> members = next->members, others = next->departing;
  for (std::vector<MemberRecord>* all : {&members, &others}) {
    for (MemberRecord& member : *all) member.ready = false;
  }
  record.members = std::move(members);
  record.others = std::move(others);
  const MeshSpec& mesh = next->definition->spec().mesh;
  record.mesh = mesh == job.defined->spec().mesh ? "" : mesh.ToString();
  record.wanted_mesh = record.mesh;
  job.definition = next->definition;
  transaction.Event(absl::StrCat("event=job_reshards job=", name, " epoch=", record.epoch,
                                 " from_epoch=", record.from_epoch, " mesh=", mesh.ToString()));
}

Assignment Coordinator::StagedAt(const Place& place) {
  const Job& job = *place.job;
  const NextMesh& next = *job.next;
  Assignment assignment{next.definition, next.epoch, place.index, {}, {}};
  assignment.staged = true;
  assignment.leaves = place.kind == Place::kDeparting;
  if (assignment.leaves) assignment.rank = next.departing[place.index].was;
  std::vector<WorkerIdentity> peers;
  std::vector<int32_t> was;
  for (const MemberRecord& peer : next.members) {
    peers.push_back(peer.worker);
    was.push_back(peer.was);
  }
  assignment.peers = std::move(peers);
  assignment.from = {job.record.epoch, job.definition->spec().mesh.ToString(), std::move(was), next.departing};
  return assignment;
}

}  // namespace shardmesh
