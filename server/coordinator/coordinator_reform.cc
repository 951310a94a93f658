// Jobs that lost a member and go on without it, or with its next incarnation.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/mesh/reform.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

absl::StatusOr<MeshSpec> FromMesh(const Job& job) {
  if (job.record.state == JobState::kReady) return job.definition->spec().mesh;
  return ParseMeshSpec(job.record.from_mesh);
}

std::vector<MemberRecord> AllHolders(const JobRecord& job) {
  std::vector<MemberRecord> all = job.members.ToVector();
  all.insert(all.end(), job.others.begin(), job.others.end());
  return all;
}

// Whether the members of a job that re-forms need nothing of the others.
bool MembersHoldAll(const JobRecord& job) {
  const absl::StatusOr<MeshSpec> from = ParseMeshSpec(job.from_mesh);
  if (!from.ok()) return false;
  std::set<int64_t> held;
  for (const MemberRecord& member : job.members) {
    if (member.was >= 0) held.insert(ShardOf(*from, member.was));
  }
  return static_cast<int64_t>(held.size()) == from->NumRanks(DimRole::kShard);
}

}  // namespace

absl::StatusOr<MeshSpec> Coordinator::WantedMesh(const Job& job) {
  if (job.record.wanted_mesh.empty()) return job.defined->spec().mesh;
  return ParseMeshSpec(job.record.wanted_mesh);
}

bool Coordinator::IsThere(const Worker& worker, absl::Time now) const {
  return worker.record.state == WorkerState::kAlive && !IsSilent(worker, now) && !worker.doubted;
}

const Worker* Coordinator::WorkerOf(const MemberRecord& member) const {
  const auto found = state_.workers.find(member.worker.name);
  return found != state_.workers.end() && SameIncarnation(member.worker, found->second.record.identity) ? &found->second
                                                                                                        : nullptr;
}

absl::Status Coordinator::CheckSupportedNow(const Job& job, Feature feature) const {
  std::set<absl::string_view> hosts;
  bool on_devices = false;
  for (const MemberRecord& member : job.record.members) {
    hosts.insert(member.worker.host_id);
    const Worker* worker = WorkerOf(member);
    on_devices = on_devices || (worker != nullptr && worker->traits.has_value() && worker->traits->has_device);
  }
  const Topology topology{static_cast<int>(hosts.size()), static_cast<int>(job.record.members.size()), on_devices};
  return CheckSupported(job.definition->spec(), job.definition->plan(), topology, feature);
}

std::vector<MemberRecord> Coordinator::Holders(const Job& job, size_t lost, absl::Time now) const {
  std::vector<MemberRecord> holders;
  for (size_t rank = 0; rank < job.record.members.size(); ++rank) {
    MemberRecord member = job.record.members[rank];
    if (job.record.state == JobState::kReady) member.was = static_cast<int32_t>(rank);
    const Worker* worker = WorkerOf(member);
    if (rank == lost || member.was < 0 || worker == nullptr || !IsThere(*worker, now)) continue;
    holders.push_back(std::move(member));
  }
  for (const MemberRecord& other : job.record.others) {
    const Worker* worker = WorkerOf(other);
    if (worker != nullptr && IsThere(*worker, now)) holders.push_back(other);
  }
  return holders;
}

Pool Coordinator::PoolOf(const Job& job, size_t lost, bool moves, absl::Time now) const {
  const SharedList<MemberRecord>& members = job.record.members;
  const std::string& host = members[0].worker.host_id;
  Pool pool{Holders(job, lost, now), Candidates(job.record, now), true, false, job.defined->spec().copies};
  for (const MemberRecord& member : AllHolders(job.record)) {
    pool.on_several = pool.on_several || member.worker.host_id != host;
  }
  for (const MemberRecord& holder : pool.holders) {
    const Worker* worker = WorkerOf(holder);
    const bool spans = worker != nullptr && worker->traits.has_value() && worker->traits->spans_hosts;
    pool.spans_hosts = pool.spans_hosts && (spans || pool.on_several);
  }
  const bool anywhere = pool.on_several || (moves && pool.spans_hosts);
  const auto unfit = [&](const Candidate& spare) {
    return (spare.worker->host_id != host && !(anywhere && spare.traits.spans_hosts)) || spare.traits.has_device ||
           (lost != kNobody && SameIncarnation(members[lost].worker, *spare.worker)) ||
           absl::c_any_of(pool.holders,
                          [&](const MemberRecord& holder) { return SameIncarnation(holder.worker, *spare.worker); });
  };
  pool.spares.erase(std::remove_if(pool.spares.begin(), pool.spares.end(), unfit), pool.spares.end());
  return pool;
}

absl::StatusOr<Reformed> Coordinator::FormWithout(const Job& job, size_t lost, absl::Time now) const {
  RETURN_IF_ERROR(CheckSupportedNow(job, Feature::kReform));
  ASSIGN_OR_RETURN(const MeshSpec from, FromMesh(job));
  ASSIGN_OR_RETURN(const MeshSpec wanted, WantedMesh(job));
  return Reform(wanted, from, PoolOf(job, lost, /*moves=*/false, now));
}

absl::Status Coordinator::ReformJob(Transaction& transaction, const std::string& name, size_t lost,
                                    const std::string& cause, absl::Time now) {
  const Job& there = state_.jobs.at(name);
  ASSIGN_OR_RETURN(Reformed reformed, FormWithout(there, lost, now));
  ASSIGN_OR_RETURN(auto definition, WithMesh(there.defined, reformed.mesh));

  Job& job = transaction.MutableJob(name);
  JobRecord& record = job.record;
  if (record.state == JobState::kReady) {
    record.from_epoch = record.epoch;
    record.from_mesh = job.definition->spec().mesh.ToString();
  }
  job.definition = std::move(definition);
  job.awaits_incarnation = false;
  record.state = JobState::kPreparing;
  record.epoch = NextEpoch(record);
  record.mesh = reformed.mesh == job.defined->spec().mesh ? "" : reformed.mesh.ToString();
  record.members = std::move(reformed.members);
  record.others = std::move(reformed.others);
  transaction.Event(absl::StrCat(
      "event=job_reforms job=", name, " epoch=", record.epoch, " from_epoch=", record.from_epoch,
      " mesh=", reformed.mesh.ToString(), " workers=",
      absl::StrJoin(record.members, ",",
                    [](std::string* out, const MemberRecord& member) { absl::StrAppend(out, member.worker.name); }),
      " cause=\"", absl::CHexEscape(cause), "\""));
  return absl::OkStatus();
}

void Coordinator::FormWithoutDeparted(Transaction& transaction, const std::string& name, const WorkerIdentity& worker,
                                      const std::string& cause, absl::Time now) {
  Job& job = transaction.MutableJob(name);
  const SharedList<MemberRecord> before = job.record.others;
  std::vector<MemberRecord> others = before.ToVector();
  others.erase(std::remove_if(others.begin(), others.end(),
                              [&](const MemberRecord& other) { return SameIncarnation(other.worker, worker); }),
               others.end());
  job.record.others = std::move(others);
  if (MembersHoldAll(job.record)) return;  // it was kept for the case that another is lost
  const std::string why = absl::StrCat("worker ", worker.name, " (pid ", worker.pid, "), which was to leave, ", cause);
  const bool too_many = ++job.lost_members > options_.max_lost_members;
  const absl::Status formed =
      too_many ? absl::FailedPreconditionError("it lost too many members without a step between them")
               : ReformJob(transaction, name, kNobody, why, now);
  if (formed.ok()) return;
  job.record.others = before;
  const std::string ended = absl::StrCat(why, "; it cannot re-form: ", formed.message());
  if (too_many) return FailJob(transaction, name, ended);
  LoseJob(transaction, name, ended, now);
}

void Coordinator::LoseDeparting(Transaction& transaction, const WorkerIdentity& worker, const std::string& cause,
                                absl::Time now) {
  std::vector<std::string> names;
  for (const Place& place : PlacesOf(worker)) {
    const JobRecord& job = place.job->record;
    if (place.kind == Place::kOther && job.state == JobState::kPreparing) names.push_back(job.name);
  }
  for (const std::string& name : names) FormWithoutDeparted(transaction, name, worker, cause, now);
}

void Coordinator::LoseDeparted(Transaction& transaction, const MemberReport& report, const WorkerIdentity& worker,
                               absl::Time now) {
  const auto found = state_.jobs.find(report.job);
  if (found == state_.jobs.end()) return;
  const JobRecord& record = found->second.record;
  const bool leaves = record.state == JobState::kPreparing && record.epoch == report.epoch &&
                      absl::c_any_of(record.others, [&](const MemberRecord& other) {
                        return SameIncarnation(other.worker, worker) && other.was == report.rank;
                      });
  if (leaves) FormWithoutDeparted(transaction, report.job, worker, absl::StrCat("failed: ", report.error), now);
}

bool Coordinator::AwaitsIncarnation(const Job& job, size_t rank, absl::Time now) const {
  const JobRecord& record = job.record;
  if (record.state != JobState::kPreparing || record.from_epoch == 0) return false;
  const WorkerIdentity& lost = record.members[rank].worker;
  if (absl::c_linear_search(record.excluded, absl::StrCat(lost.name, "@", lost.incarnation))) return false;
  const Worker* worker = WorkerOf(record.members[rank]);
  const bool comes_back = worker != nullptr && worker->record.state == WorkerState::kAlive && !IsSilent(*worker, now) &&
                          worker->traits.has_value() && worker->traits->retained;
  return comes_back && !FormWithout(job, rank, now).ok();
}

void Coordinator::FormAgain(Transaction& transaction, const WorkerIdentity& worker, absl::Time now) {
  std::vector<std::string> names;
  for (const Place& place : PlacesOf(worker)) {
    const std::string& name = place.job->record.name;
    const bool holds = place.kind == Place::kMember || place.kind == Place::kOther;
    if (holds && place.job->awaits_incarnation && (names.empty() || names.back() != name)) names.push_back(name);
  }
  for (const std::string& name : names) {
    const std::string cause = absl::StrCat("worker ", worker.name, " is there again");
    ReformJob(transaction, name, kNobody, cause, now).IgnoreError();  // it waits on
  }
}

std::vector<std::string> Coordinator::TakeOverHeld(Transaction& transaction, const WorkerIdentity& last,
                                                   const WorkerIdentity& next, const std::vector<ResumedJob>& resumed) {
  std::vector<std::string> names;
  for (const Place& place : PlacesOf(last)) {
    const Job& there = *place.job;
    const std::string& name = there.record.name;
    if (there.record.state != JobState::kPreparing || there.record.from_epoch == 0) continue;
    const auto held = [&](const MemberRecord& member) {
      return SameIncarnation(member.worker, last) && absl::c_any_of(resumed, [&](const ResumedJob& job) {
               return job.job == there.record.name && job.epoch == there.record.from_epoch && job.rank == member.was &&
                      SameSecret(job.secret, there.record.secret);
             });
    };
    if (absl::c_none_of(AllHolders(there.record), held)) continue;
    JobRecord& record = transaction.MutableJob(name).record;
    for (SharedList<MemberRecord>* all : {&record.members, &record.others}) {
      std::vector<MemberRecord> changed = all->ToVector();
      for (MemberRecord& member : changed) {
        if (held(member)) member.worker = next;
      }
      *all = std::move(changed);
    }
    names.push_back(name);
  }
  return names;
}

void Coordinator::MakeReady(Transaction& transaction, const std::string& name) {
  JobRecord& job = transaction.MutableJob(name).record;
  job.state = JobState::kReady;
  job.from_epoch = 0;
  job.from_mesh.clear();
  job.others.clear();
  std::vector<MemberRecord> members = job.members.ToVector();
  for (MemberRecord& member : members) {
    member.ready = true;
    member.was = -1;
  }
  job.members = std::move(members);
  if (job.goes_back) {
    job.goes_back = false;
    job.gone_back.epoch = job.epoch;
  }
  transaction.Event(absl::StrCat("event=job_ready job=", job.name, " epoch=", job.epoch));
}

Origin Coordinator::OriginOf(const Job& job) const {
  const JobRecord& record = job.record;
  Origin from{record.from_epoch, record.from_mesh, {}, record.others};
  if (record.from_epoch > 0) from.was = state_.places.ToldOf(state_.jobs, job).was;
  return from;
}

// What a state file says of a job that was formed anew.
absl::Status Coordinator::LoadMeshes(Job& job) {
  JobRecord& record = job.record;
  RETURN_IF_ERROR(WantedMesh(job).status());
  if (!record.mesh.empty()) {
    ASSIGN_OR_RETURN(const MeshSpec mesh, ParseMeshSpec(record.mesh));
    ASSIGN_OR_RETURN(job.definition, WithMesh(job.defined, mesh));
  }
  if (record.from_epoch == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const MeshSpec from, ParseMeshSpec(record.from_mesh));
  for (const MemberRecord& member : AllHolders(record)) {
    if (member.was < -1 || member.was >= from.NumRanks()) {
      return absl::DataLossError(absl::StrCat("worker ", member.worker.name, " was no rank of ", record.from_mesh));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
