// Jobs that lost a member and go on without it.
#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "server/coordinator.h"
#include "server/reform.h"

namespace shardmesh {
namespace {

absl::StatusOr<MeshSpec> FromMesh(const Job& job) {
  if (job.record.state == JobState::kReady) return job.definition->spec().mesh;
  return ParseMeshSpec(job.record.from_mesh);
}

}  // namespace

bool Coordinator::IsThere(const Worker& worker, absl::Time now) const {
  return worker.record.state == WorkerState::kAlive && !IsSilent(worker, now) && !worker.doubted;
}

const Worker* Coordinator::WorkerOf(const MemberRecord& member) const {
  const auto found = state_.workers.find(member.worker.name);
  return found != state_.workers.end() && SameLife(member.worker, found->second.record.identity) ? &found->second
                                                                                                 : nullptr;
}

// Traits are not stored; all members are on devices, or none is.
absl::Status Coordinator::CheckReforms(const Job& job) const {
  const std::vector<MemberRecord>& members = job.record.members;
  if (!OnOneHost(members)) return absl::FailedPreconditionError("jobs on several hosts do not re-form");
  if (job.definition->spec().residency != Residency::kFull) {
    return absl::FailedPreconditionError("jobs with bucket residency do not re-form");
  }
  const bool on_devices = absl::c_any_of(members, [&](const MemberRecord& member) {
    const Worker* worker = WorkerOf(member);
    return worker != nullptr && worker->traits.has_value() && worker->traits->has_device;
  });
  return on_devices ? absl::FailedPreconditionError("its members are on CUDA devices") : absl::OkStatus();
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

std::vector<Candidate> Coordinator::Spares(const Job& job, size_t lost, const std::vector<MemberRecord>& holders,
                                           absl::Time now) const {
  const WorkerIdentity& gone = job.record.members[lost].worker;
  std::vector<Candidate> spares = Candidates(job.record, now, CountJobs());
  const auto unfit = [&](const Candidate& spare) {
    return spare.worker->host_id != gone.host_id || spare.traits.has_device || SameLife(gone, *spare.worker) ||
           absl::c_any_of(holders, [&](const MemberRecord& holder) { return SameLife(holder.worker, *spare.worker); });
  };
  spares.erase(std::remove_if(spares.begin(), spares.end(), unfit), spares.end());
  return spares;
}

absl::Status Coordinator::ReformJob(Transaction& transaction, const std::string& name, size_t lost,
                                    const std::string& cause, absl::Time now) {
  const Job& there = state_.jobs.at(name);
  RETURN_IF_ERROR(CheckReforms(there));
  ASSIGN_OR_RETURN(const MeshSpec from, FromMesh(there));
  const std::vector<MemberRecord> holders = Holders(there, lost, now);
  const MeshSpec& defined = there.defined->spec().mesh;
  ASSIGN_OR_RETURN(Reformed reformed, Reform(defined, from, holders, Spares(there, lost, holders, now)));
  ASSIGN_OR_RETURN(auto definition, WithMesh(there.defined, reformed.mesh));

  Job& job = transaction.MutableJob(name);
  job.definition = std::move(definition);
  JobRecord& record = job.record;
  if (record.state == JobState::kReady) {
    record.from_epoch = record.epoch;
    record.from_mesh = from.ToString();
  }
  record.state = JobState::kPreparing;
  record.epoch = NextEpoch(record);
  record.mesh = reformed.mesh == defined ? "" : reformed.mesh.ToString();
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

void Coordinator::MakeReady(Transaction& transaction, JobRecord& job) {
  job.state = JobState::kReady;
  job.from_epoch = 0;
  job.from_mesh.clear();
  job.others.clear();
  for (MemberRecord& member : job.members) member.was = -1;
  transaction.Event(absl::StrCat("event=job_ready job=", job.name, " epoch=", job.epoch));
}

Origin Coordinator::OriginOf(const JobRecord& job) {
  Origin from{job.from_epoch, job.from_mesh, {}};
  if (job.from_epoch == 0) return from;
  for (const MemberRecord& member : job.members) from.was.push_back(member.was);
  return from;
}

// What a state file says of a job that was formed anew.
absl::Status Coordinator::LoadMeshes(Job& job) {
  JobRecord& record = job.record;
  if (!record.mesh.empty()) {
    ASSIGN_OR_RETURN(const MeshSpec mesh, ParseMeshSpec(record.mesh));
    ASSIGN_OR_RETURN(job.definition, WithMesh(job.defined, mesh));
  }
  if (record.from_epoch == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const MeshSpec from, ParseMeshSpec(record.from_mesh));
  std::vector<MemberRecord> all = record.members;
  all.insert(all.end(), record.others.begin(), record.others.end());
  for (const MemberRecord& member : all) {
    if (member.was < -1 || member.was >= from.NumRanks()) {
      return absl::DataLossError(absl::StrCat("worker ", member.worker.name, " was no rank of ", record.from_mesh));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
