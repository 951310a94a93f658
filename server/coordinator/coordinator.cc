#include "server/coordinator/coordinator.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Create(const CoordinatorOptions& options,
                                                                 std::unique_ptr<Store> store, absl::Time now) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(options, std::move(store)));
  RETURN_IF_ERROR(coordinator->Load(now));
  return coordinator;
}

absl::Status Coordinator::Load(absl::Time now) {
  ASSIGN_OR_RETURN(StoreContents contents, store_->Load());
  for (auto& [name, record] : contents.workers) state_.workers[name] = {std::move(record), now};
  for (auto& [name, record] : contents.jobs) {
    auto definition = JobDefinition::Parse(contents.specs[name]);
    if (!definition.ok()) {
      return absl::DataLossError(absl::StrCat("the stored specification of job ", name, " is damaged: ",
                                              definition.status().message(), "; restore a copy of the state file"));
    }
    Job job{std::move(record), *definition, *definition};
    if (const absl::Status meshes = LoadMeshes(job); !meshes.ok()) {
      return absl::DataLossError(absl::StrCat("what is stored of the mesh of job ", name,
                                              " is damaged: ", meshes.message(), "; restore a copy of the state file"));
    }
    const size_t ranks = static_cast<size_t>(job.definition->plan().num_ranks());
    if (!job.record.members.empty() && job.record.members.size() != ranks) {
      return absl::DataLossError(absl::StrCat("what is stored of job ", name,
                                              " is damaged: ", job.record.members.size(), " members, and its mesh has ",
                                              ranks, " ranks; restore a copy of the state file"));
    }
    RETURN_IF_ERROR(CheckMembersJoined(job.record));
    for (size_t rank = 0; rank < job.record.members.size(); ++rank) {  // of a file that an older version wrote
      if (job.record.members[rank].ready) job.ready.Add(job.record.epoch, ranks, rank);
    }
    job.back_since = job.assigned_at = now;
    state_.jobs[name] = std::move(job);
    state_.places.Touch(name);
  }
  state_.places.Settle(state_.jobs);
  state_.epoch_floor = contents.epoch_floor;
  last_tick_ = last_come_ = now;
  events_.push_back(absl::StrCat("event=loaded jobs=", state_.jobs.size(), " workers=", state_.workers.size()));
  return absl::OkStatus();
}

// Who is a member of a job that is assigned is the incarnation that joined last: else its end would never be noticed.
absl::Status Coordinator::CheckMembersJoined(const JobRecord& job) const {
  if (job.state != JobState::kPreparing && job.state != JobState::kReady) return absl::OkStatus();
  for (const MemberRecord& member : job.members) {
    const auto found = state_.workers.find(member.worker.name);
    if (found != state_.workers.end() && SameIncarnation(found->second.record.identity, member.worker)) continue;
    return absl::DataLossError(absl::StrCat(
        "what is stored of job ", job.name, " is damaged: its member ", member.worker.name, " is incarnation ",
        member.worker.incarnation, ", and ",
        found == state_.workers.end() ? "no such worker" : absl::StrCat(found->second.record.identity.incarnation),
        " has joined; restore a copy of the state file"));
  }
  return absl::OkStatus();
}

absl::Status Coordinator::Commit(Transaction& transaction) {
  const absl::Status status = transaction.Commit();
  if (!status.ok()) assign_ = true;  // what was assigned was put back
  return status;
}

bool Coordinator::IsSilent(const Worker& worker, absl::Time now) const {
  return now - worker.last_heartbeat > options_.heartbeat_timeout;
}

void Coordinator::Hear(Worker& worker, absl::Time now) {
  const bool again = IsSilent(worker, now) || worker.doubted;  // it counts again, although no tick saw it silent
  if (again) last_come_ = now;
  assign_ = assign_ || again;
  worker.doubted = false;
  worker.last_heartbeat = now;
}

absl::Status Coordinator::Tick(absl::Time now) {
  if (now - last_tick_ > options_.heartbeat_timeout / 2) {
    events_.push_back(absl::StrCat("event=held_up for_ms=", absl::ToInt64Milliseconds(now - last_tick_)));
    for (auto& [name, worker] : state_.workers) Hear(worker, now);
  }
  assign_ = assign_ || now < last_tick_;  // the clock was set back: who was silent may not be
  last_tick_ = now;
  Transaction transaction = NewTransaction();
  std::map<std::string, Ending> silent;
  for (auto& [name, worker] : state_.workers) {
    if (worker.last_heartbeat > now) worker.last_heartbeat = now;  // the clock was set back
    if (worker.record.state == WorkerState::kAlive && IsSilent(worker, now)) silent[name] = SilenceOf(worker, now);
  }
  MarkDead(transaction, silent, now);
  for (const auto& [name, job] : state_.jobs) {
    if (job.progress_unsaved) transaction.MutableJob(name);
    if (job.record.goes_back) GiveUpReading(transaction, name, now);
    assign_ = assign_ || (job.record.goes_back && job.record.state == JobState::kWaiting);  // it may shrink by now
    if (job.next != nullptr && now - job.next->since > options_.reshard_timeout) {
      GiveUpReshard(transaction, name,
                    absl::StrCat("its workers did not have their memory within ",
                                 absl::FormatDuration(options_.reshard_timeout)));
    }
  }
  AssignWaitingJobs(transaction, now);
  const absl::StatusOr<std::string> checked = store_->Check();
  RETURN_IF_ERROR(Commit(transaction));
  RETURN_IF_ERROR(checked.status());
  if (!checked->empty()) events_.push_back(*checked);
  return absl::OkStatus();
}

std::vector<std::string> Coordinator::TakeEvents() { return std::exchange(events_, {}); }

}  // namespace shardmesh
