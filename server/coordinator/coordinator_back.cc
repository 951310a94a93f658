// Jobs that go back to a checkpoint by themselves, since they lost a shard of which no other copy is left.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/mesh/reform.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

constexpr int kPatience = 10;             // time-outs in which workers may come before the mesh shrinks all the same
constexpr double kSlowestReading = 50e6;  // bytes a second
constexpr double kElementBytes = 16;      // stored, at most: fp32, and three states in fp32

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", absl::CHexEscape(text), "\""); }

// In events.
std::string PlaceOf(const CheckpointRecord& checkpoint) {
  return checkpoint.copied_at > 0 ? absl::StrCat("copied_at=", checkpoint.copied_at)
                                  : absl::StrCat("folder=", Quoted(checkpoint.folder));
}

}  // namespace

absl::Status Coordinator::RecordCheckpoint(const std::string& name, int64_t uid, int64_t epoch,
                                           const CheckpointRecord& checkpoint) {
  const auto found = state_.jobs.find(name);
  if (found == state_.jobs.end()) return NoSuchJob(name);
  const Job& there = found->second;
  if (there.record.uid != uid) return absl::NotFoundError(IsAnother(there.record, uid));
  if (there.defined->spec().on_loss != OnLoss::kCheckpoint) return absl::OkStatus();
  if (epoch > there.record.epoch) {
    return absl::InvalidArgumentError(absl::StrCat("epoch is ", epoch, "; job ", name, " is at ", there.record.epoch));
  }
  if (there.record.goes_back || epoch < there.record.gone_back.epoch) {
    return absl::AbortedError(absl::StrCat("job ", name, " has gone back to step ",
                                           there.record.gone_back.checkpoint.step, " since epoch ", epoch,
                                           "; the checkpoint of step ", checkpoint.step, " is of steps that it left"));
  }
  if (!there.record.checkpoints.empty() && there.record.checkpoints.front() == checkpoint) return absl::OkStatus();
  Transaction transaction = NewTransaction();
  std::vector<CheckpointRecord>& all = transaction.MutableJob(name).record.checkpoints;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](const CheckpointRecord& older) { return older.folder == checkpoint.folder; }),
            all.end());
  all.insert(all.begin(), checkpoint);
  if (all.size() > kMaxCheckpoints) all.resize(kMaxCheckpoints);
  transaction.Event(absl::StrCat("event=checkpoint_recorded job=", name, " step=", checkpoint.step,
                                 " folder=", Quoted(checkpoint.folder)));
  return Commit(transaction);
}

// Copies that turn out to be lost with workers in doubt are passed over, and with them all that are older: so those of
// workers which are certain to be there come first.
std::optional<CheckpointRecord> Coordinator::BackOf(const Job& job, absl::Time now) const {
  std::optional<CopiesPlace> copies = FindCopies(job, now, CopyHolders::kCertain);
  if (!copies.has_value()) copies = FindCopies(job, now, CopyHolders::kHeard);
  const std::vector<CheckpointRecord>& checkpoints = job.record.checkpoints;
  const bool may = job.defined->spec().on_loss == OnLoss::kCheckpoint && !checkpoints.empty();
  if (copies.has_value() && (!may || copies->checkpoint.step >= checkpoints.front().step)) return copies->checkpoint;
  return may ? std::make_optional(checkpoints.front()) : std::nullopt;
}

void Coordinator::LoseJob(Transaction& transaction, const std::string& name, const std::string& cause, absl::Time now) {
  const Job& job = state_.jobs.at(name);
  const JobSpec& spec = job.defined->spec();
  if (const std::optional<CheckpointRecord> back = BackOf(job, now); back.has_value()) {
    return GoBack(transaction, name, *back, cause, now);
  }
  std::string nowhere;
  if (spec.copies > 1) absl::StrAppend(&nowhere, "; there is no step of which each shard is on a host that is left");
  if (spec.on_loss == OnLoss::kCheckpoint) absl::StrAppend(&nowhere, "; it has no checkpoint to go back to");
  FailJob(transaction, name, absl::StrCat(cause, nowhere));
}

void Coordinator::GoBack(Transaction& transaction, const std::string& name, const CheckpointRecord& checkpoint,
                         const std::string& cause, absl::Time now) {
  GiveUpReshard(transaction, name, cause);
  Job& job = transaction.MutableJob(name);
  JobRecord& record = job.record;
  if (!record.goes_back) {
    // Without a step since the last time that one's steps are lost as before. A step that no report told of may be, too.
    const bool again = record.gone_back.epoch > 0 && record.committed_step <= record.gone_back.checkpoint.step;
    const int64_t lost = std::max(record.committed_step, again ? record.gone_back.lost_step : -1);
    record.gone_back = {0, checkpoint, std::max(lost, checkpoint.step), cause};
    job.back_since = now;
  }
  record.goes_back = true;
  record.gone_back.checkpoint = checkpoint;
  record.committed_step = checkpoint.step;
  record.published_steps.clear();
  record.from_epoch = 0;
  record.from_mesh.clear();
  record.others.clear();
  job.behind.reset();
  job.awaits_incarnation = false;
  transaction.Event(absl::StrCat("event=job_goes_back job=", name, " epoch=", record.epoch, " step=", checkpoint.step,
                                 " lost_step=", record.gone_back.lost_step, " ", PlaceOf(checkpoint),
                                 " cause=", Quoted(cause)));
  Unassign(transaction, name);
}

void Coordinator::PassOverCheckpoint(Transaction& transaction, const std::string& name, const std::string& cause,
                                     absl::Time now) {
  Job& job = transaction.MutableJob(name);
  const CheckpointRecord passed = job.record.gone_back.checkpoint;
  if (passed.copied_at > 0) {
    job.copies.passed_epoch = passed.copied_at;
    job.copies.passed_step = passed.step;
  }
  std::vector<CheckpointRecord>& all = job.record.checkpoints;
  all.erase(std::remove(all.begin(), all.end(), passed), all.end());
  const std::string why = absl::StrCat("it cannot go back to ", passed.copied_at > 0 ? "the copies" : "the checkpoint",
                                       " of step ", passed.step, passed.copied_at > 0 ? "" : " in ",
                                       passed.copied_at > 0 ? "" : Quoted(passed.folder), ": ", cause);
  transaction.Event(absl::StrCat("event=checkpoint_passed_over job=", name, " step=", passed.step, " ", PlaceOf(passed),
                                 " cause=", Quoted(cause)));
  if (const std::optional<CheckpointRecord> next = BackOf(job, now); next.has_value()) {
    return GoBack(transaction, name, *next, why, now);
  }
  FailJob(transaction, name, absl::StrCat(job.record.gone_back.cause, "; ", why, "; it knows no older one"));
}

// A smaller mesh is for good, so workers that are about to come back are waited for: until none has come for a time-out, or
// some come again and again. A job that goes back to copies lost a host and has the others, as one that re-forms; but a
// coordinator that restarted hears of all workers first.
bool Coordinator::MayShrink(const Job& job, absl::Time now) const {
  if (job.record.gone_back.checkpoint.copied_at > 0) {
    return absl::c_none_of(state_.workers, [&](const auto& named) {
      return IsThere(named.second, now) && !named.second.traits.has_value();
    });
  }
  return now - std::max(job.back_since, last_come_) >= options_.heartbeat_timeout ||
         now - job.back_since >= options_.heartbeat_timeout * kPatience;
}

absl::Status Coordinator::FitToWorkers(Transaction& transaction, const std::string& name, absl::Time now) {
  const Job& there = state_.jobs.at(name);
  ASSIGN_OR_RETURN(const MeshSpec wanted, WantedMesh(there));
  const std::vector<Candidate> candidates = Candidates(there.record, now);
  MeshSpec mesh = wanted;
  if (MayShrink(there, now)) {
    auto fits = [&] {
      return !ChooseMembers(
                  {mesh.NumRanks(), HostCounts(mesh, there.defined->spec().copies), there.defined->refusals()},
                  candidates)
                  .members.empty();
    };
    for (int64_t workers = mesh.NumRanks(); workers > 1 && !fits();) mesh = MeshFor(wanted, --workers);
    if (!fits()) mesh = wanted;
  }
  if (mesh == there.definition->spec().mesh) return absl::OkStatus();
  ASSIGN_OR_RETURN(auto definition, WithMesh(there.defined, mesh));
  Job& job = transaction.MutableJob(name);
  job.definition = std::move(definition);
  job.record.mesh = mesh == job.defined->spec().mesh ? "" : mesh.ToString();
  return absl::OkStatus();
}

void Coordinator::ApplyRead(Transaction& transaction, const MemberReport& report, const Job& there,
                            const WorkerIdentity& worker, absl::Time now) {
  ReadShards::Said said;
  said.digest = report.loaded_digest;
  if (report.unreadable) said = {std::nullopt, absl::StrCat("worker ", worker.name, ": ", report.error)};
  Job& job = state_.jobs.at(report.job);
  job.read.Add(report.epoch, there.definition->plan().num_ranks(), report.rank, std::move(said));
  if (job.read.AllSaid(report.epoch)) DecideRead(transaction, report.job, now);
}

void Coordinator::DecideRead(Transaction& transaction, const std::string& name, absl::Time now) {
  const Job& job = state_.jobs.at(name);
  const std::vector<ReadShards::Said>& said = job.read.said();
  std::vector<std::string> cannot, errors;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank].digest.has_value()) continue;
    const WorkerIdentity& worker = job.record.members[rank].worker;
    cannot.push_back(absl::StrCat(worker.name, "@", worker.incarnation));
    errors.push_back(said[rank].error);
  }
  if (cannot.size() == said.size()) return PassOverCheckpoint(transaction, name, errors.front(), now);
  const CheckpointRecord& checkpoint = job.record.gone_back.checkpoint;
  if (!cannot.empty() && checkpoint.copied_at > 0) return PassOverCheckpoint(transaction, name, errors.front(), now);
  if (!cannot.empty()) {  // others can
    std::vector<std::string>& excluded = transaction.MutableJob(name).record.excluded;
    excluded.insert(excluded.end(), cannot.begin(), cannot.end());
    return GoBack(transaction, name, CheckpointRecord(checkpoint), absl::StrJoin(errors, "; "), now);
  }
  const Plan& plan = job.definition->plan();
  for (int replica = 0; replica < plan.num_replicas(); ++replica) {
    uint64_t sum = 0;
    for (int shard = 0; shard < plan.num_shards(); ++shard) sum += *said[plan.RankOf({shard, replica}).value()].digest;
    if (sum == checkpoint.digest) continue;
    return PassOverCheckpoint(transaction, name,
                              absl::StrFormat("the digest of what was read is %016x; %016x was saved: it changed since",
                                              sum, checkpoint.digest),
                              now);
  }
}

void Coordinator::GiveUpReading(Transaction& transaction, const std::string& name, absl::Time now) {
  Job& job = state_.jobs.at(name);
  const JobRecord& record = job.record;
  if (!record.goes_back || job.read.AllSaid(record.epoch)) return;
  if (const CheckpointRecord& back = record.gone_back.checkpoint;
      back.copied_at > 0 && MayShrink(job, now) && !CopiesOf(job, back, now).whole) {
    return PassOverCheckpoint(transaction, name, "workers that had some of them are gone since", now);
  }
  if (record.state != JobState::kPreparing) return;
  const Plan& plan = job.definition->plan();
  double bytes = 0;
  for (const Bucket& bucket : plan.buckets()) bytes += static_cast<double>(bucket.num_elements) * kElementBytes;
  const absl::Duration limit = options_.read_timeout + absl::Seconds(bytes / kSlowestReading);
  if (now - job.assigned_at < limit) return;
  for (int rank = 0; rank < plan.num_ranks(); ++rank) {
    if (job.read.Has(record.epoch, rank)) continue;
    const std::string error = absl::StrCat("worker ", record.members[rank].worker.name,
                                           " did not read its shard within ", absl::FormatDuration(limit));
    job.read.Add(record.epoch, plan.num_ranks(), rank, {std::nullopt, error});
  }
  DecideRead(transaction, name, now);
}

}  // namespace shardmesh
