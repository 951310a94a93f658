// Worker's part in a job that goes on at a later epoch, since a member was lost or it is brought to another mesh
// (reform.h).
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "worker/process/worker.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kBuilt = absl::Milliseconds(10);
constexpr absl::Duration kAskOne = absl::Seconds(1);  // before another member of its host is asked
}  // namespace

// An attempt to go on that lost a member itself may lie between.
std::shared_ptr<Worker::Entry> Worker::TakeHeld(int64_t epoch, std::shared_ptr<Entry>& held) {
  if (held->assignment.epoch() == epoch) return std::move(held);
  return held->before != nullptr && held->before->assignment.epoch() == epoch ? std::move(held->before) : nullptr;
}

std::shared_ptr<Worker::Entry> Worker::TakeBefore(const v1::Assignment& assignment, std::shared_ptr<Entry>& held) {
  const v1::Origin& from = assignment.from();
  const int rank = assignment.rank();
  if (!assignment.has_from() || rank < 0 || rank >= from.was_size() || from.was(rank) < 0) return nullptr;
  return TakeHeld(from.epoch(), held);
}

std::shared_ptr<JobShard> Worker::HeldBefore(const Entry& entry) const {
  MutexLock lock(mu_);
  return entry.before == nullptr ? nullptr : entry.before->shard;
}

absl::Status Worker::CheckOrigin(const v1::Assignment& assignment) {
  const v1::Origin& from = assignment.from();
  ASSIGN_OR_RETURN(const MeshSpec mesh, ParseMeshSpec(from.mesh()));
  std::set<int32_t> seen;
  bool good = from.was_size() == assignment.peers_size() && from.epoch() < assignment.epoch();
  const auto take = [&](int32_t was) {
    good = good && was >= 0 && was < std::min<int64_t>(mesh.NumRanks(), kMaxHostRanks) && seen.insert(was).second;
  };
  for (const int32_t was : from.was()) {
    if (was != -1) take(was);
  }
  for (const v1::Peer& departing : from.departing()) take(departing.rank());
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "ranks ", absl::StrJoin(from.was(), ","), " and ", from.departing_size(), " that leave of mesh ", from.mesh(),
      " at epoch ", from.epoch(), " are not those of ", assignment.peers_size(), " members at a later one"));
}

absl::StatusOr<std::shared_ptr<JobShard>> Worker::AwaitHeldBefore(const Entry& entry) const {
  const absl::Time deadline = MonotonicNow() + options_.prepare_timeout;
  while (true) {
    {
      MutexLock lock(mu_);
      if (entry.before == nullptr || entry.before->shard != nullptr) {
        return entry.before == nullptr ? nullptr : entry.before->shard;
      }
      if (entry.before->state == v1::MEMBER_STATE_FAILED) return absl::UnavailableError(entry.before->error);
    }
    if (entry.closing.load()) return absl::CancelledError("the job is assigned anew");
    if (MonotonicNow() >= deadline)
      return absl::DeadlineExceededError("what its last incarnation held is not there yet");
    absl::SleepFor(kBuilt);
  }
}

absl::Status Worker::EndBefore(const Entry& entry) {
  const v1::Origin& from = entry.assignment.from();
  const int rank = entry.assignment.rank();
  ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> before, AwaitHeldBefore(entry));
  if (before == nullptr) {
    if (rank > 0 && !entry.assignment.leaves() && from.was(rank) < 0) return absl::OkStatus();  // rank 0 tells the step
    return absl::FailedPreconditionError(
        absl::StrCat("this worker does not hold what it held of epoch ", from.epoch(), " any more"));
  }
  const OriginHolders holders(from);
  const HostRanks ranks = before->protocol().local();
  const std::vector<Rank> givers = GiversOf(before->plan(), holders.holders());
  // Any of the host's: one may be hung.
  const AskHost ask = [&](int host) -> absl::StatusOr<std::string> {
    const absl::Time deadline = MonotonicNow() + options_.prepare_timeout;
    absl::Status last = absl::InternalError(absl::StrCat("nobody is known of host ", host));
    do {
      for (const Rank giver : givers) {
        const v1::Peer* const peer = OriginHolders::Find(entry.assignment, giver.value());
        if (ranks.HostOf(giver) != host || peer == nullptr) continue;
        absl::StatusOr<std::string> said =
            AskProgress({entry.assignment, options_.transfer, entry.closing, kAskOne}, *peer);
        if (said.ok() || !absl::IsUnavailable(said.status())) return said;
        last = said.status();
      }
    } while (absl::IsUnavailable(last) && MonotonicNow() < deadline);
    return last;
  };
  Reach(FaultPoint::kEpochEnding);
  const absl::Status ended =
      before->End({givers, ask, IsAnyLost(before->plan(), holders.holders())}, entry.closing, options_.prepare_timeout);
  if (ended.ok()) Reach(FaultPoint::kEpochEnded);
  return Annotate(ended, absl::StrCat("ending epoch ", from.epoch()));
}

EndingCall Worker::CallOf(const Entry& entry) const {
  return {entry.assignment, options_.transfer, entry.closing, options_.prepare_timeout};
}

// Rank 0 was a member of the older epoch; the lead of another host may not have been.
absl::StatusOr<Bequest> Worker::BequestFor(const Entry& entry, const JobShard* before) const {
  if (before == nullptr) return AskBequest(CallOf(entry), entry.assignment.peers(0));
  return BequestOf(*before->protocol().control(), *before->epoch_end().ending());
}

absl::Status Worker::RestoreFrom(const Entry& entry, JobShard& shard) {
  const std::shared_ptr<JobShard> before = HeldBefore(entry);
  if (shard.rank().value() == shard.protocol().local().first()) {
    ASSIGN_OR_RETURN(const Bequest bequest, BequestFor(entry, before.get()));
    BeginRestored(bequest, *shard.protocol().control());
  }
  RETURN_IF_ERROR(
      RestoreShard({entry.assignment, before, options_.transfer, entry.closing, options_.prepare_timeout}, shard));
  const int64_t step = shard.protocol().control()->restored_step_plus_one.load() - 1;
  // The slowest member may have begun a preparation later, and has as much to move.
  const absl::Time deadline =
      MonotonicNow() + options_.prepare_timeout + TransferTime(StorageBytesOfAll(shard.plan()));
  while (step != kNoStep) {
    const absl::Status there = shard.protocol().outcomes().AwaitCommit(Step(step), kSlice).status();
    if (!absl::IsDeadlineExceeded(there)) return there;
    if (entry.closing.load()) return absl::CancelledError("the job is assigned anew");
    if (MonotonicNow() >= deadline) return Annotate(there, "waiting for the other members' shards");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<JobShard>> Worker::FindHeld(const std::string& job, int64_t epoch,
                                                           absl::string_view secret) const {
  MutexLock lock(mu_);
  const auto it = jobs_.find(job);
  const std::shared_ptr<Entry> entry = it == jobs_.end() ? nullptr : it->second;
  for (const std::shared_ptr<Entry>& held : {entry, entry == nullptr ? nullptr : entry->before}) {
    if (held == nullptr || held->assignment.epoch() != epoch) continue;
    if (!SameSecret(held->assignment.secret(), secret)) {
      return absl::PermissionDeniedError(absl::StrCat("the caller does not show the secret of job ", job,
                                                      "; only its members, which the coordinator tells it, may ask"));
    }
    if (held->shard != nullptr) return held->shard;
    return absl::UnavailableError(absl::StrCat("worker ", options_.name, " is still building what it has of epoch ",
                                               epoch, " of job \"", job.substr(0, 200), "\"; ask again"));
  }
  return absl::NotFoundError(absl::StrCat("worker ", options_.name, " holds nothing of epoch ", epoch, " of job \"",
                                          job.substr(0, 200), "\""));
}

}  // namespace shardmesh
