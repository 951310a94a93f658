// Worker's part in the copies of a job with copies=2 (worker/move/peer_copies.h).
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "worker/process/worker.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(5);
constexpr absl::Duration kAgain = absl::Milliseconds(200);  // after a round that failed
constexpr absl::Duration kTell = absl::Seconds(10);
// Of a job that it is in no more: members of a later epoch may read what this worker keeps.
constexpr absl::Duration kKeepLeft = absl::Minutes(1);
// A digest copies the shards, and delays a step: it takes at most this share of the time, but for one in a minute.
constexpr int kShare = 50;
constexpr absl::Duration kShortestPause = absl::Milliseconds(50), kLongestPause = absl::Minutes(1);
constexpr absl::Duration kTellAgain = absl::Seconds(1);  // while there is no step

// One call of Shard.Copy at every member, each on a thread of its own.
class MemberCalls {
 public:
  MemberCalls(const CopyFn& copy, const v1::Assignment& assignment, const v1::CopyRequest& request,
              absl::Duration timeout) {
    std::vector<Answer>(assignment.peers_size()).swap(answers_);
    for (int rank = 0; rank < assignment.peers_size(); ++rank) {
      absl::StatusOr<std::thread> thread = StartThread("a round of copies", [=, &copy, &assignment] {
        const auto told = [&](const v1::FileProgress& progress) { return Told(rank, progress); };
        End(rank, copy(assignment.peers(rank), request, told, timeout));
      });
      if (thread.ok()) {
        threads_.push_back(*std::move(thread));
      } else {
        End(rank, thread.status());
      }
    }
  }
  ~MemberCalls() {
    Cancel();
    for (std::thread& thread : threads_) thread.join();
  }
  void Cancel() {
    MutexLock lock(mu_);
    cancelled_ = true;
  }

  // Waits until all have said something, or some call has ended in an error, or `stop()`; whether it was the first.
  bool AwaitTold(const std::function<bool()>& stop) {
    return Await(stop, [](const Answer& answer) { return answer.told; });
  }
  bool AwaitEnded(const std::function<bool()>& stop) {
    return Await(stop, [](const Answer& answer) { return answer.ended; });
  }
  absl::Status error() const {
    MutexLock lock(mu_);
    return error_;
  }
  // By rank. REQUIRES: AwaitEnded.
  std::vector<v1::FileProgress> last() const {
    MutexLock lock(mu_);
    std::vector<v1::FileProgress> all;
    for (const Answer& answer : answers_) all.push_back(answer.last);
    return all;
  }

 private:
  struct Answer {
    bool told = false, ended = false;
    v1::FileProgress last;
  };

  template <class Is>
  bool Await(const std::function<bool()>& stop, Is is) {
    MutexLock lock(mu_);
    while (true) {
      if (!error_.ok() || stop()) return false;
      if (std::all_of(answers_.begin(), answers_.end(), is)) return true;
      changed_.WaitFor(mu_, kLook);
    }
  }
  absl::Status Told(int rank, const v1::FileProgress& progress) {
    MutexLock lock(mu_);
    answers_[rank].told = true;
    answers_[rank].last = progress;
    changed_.SignalAll();
    return cancelled_ ? absl::CancelledError("the round is over") : absl::OkStatus();
  }
  void End(int rank, const absl::StatusOr<v1::FileProgress>& last) {
    MutexLock lock(mu_);
    answers_[rank].ended = last.ok();
    if (last.ok()) answers_[rank].last = *last;
    error_.Update(Annotate(last.status(), absl::StrCat("rank ", rank)));
    changed_.SignalAll();
  }

  mutable Mutex mu_;
  CondVar changed_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  std::vector<Answer> answers_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

// A digest of the job; nullopt: `stop()`, or the job is over.
std::optional<std::pair<Step, uint64_t>> DigestNow(JobShard& shard, const std::function<bool()>& stop) {
  const uint64_t ticket = shard.protocol().tickets().AskForDigest();
  while (!stop()) {
    const auto digest = shard.protocol().tickets().DigestOf(ticket);
    if (!digest.ok()) return std::nullopt;
    if (digest->has_value()) return **digest;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return std::nullopt;
}

// What all members say of a round: the step, if all made their copies of one and these have the job's digest.
absl::StatusOr<v1::WholeCopies> WholeOf(const Plan& plan, const HostRanks& ranks,
                                        const std::vector<v1::FileProgress>& said, uint64_t digest) {
  v1::WholeCopies whole;
  whole.set_step(said[0].step());
  uint64_t sum = 0;
  const int all = plan.num_ranks();
  for (int keeper = 0; keeper < all; ++keeper) {
    if (said[keeper].step() != whole.step()) {
      return absl::AbortedError(absl::StrCat("rank ", keeper, " copied step ", said[keeper].step(), ", rank 0 step ",
                                             whole.step(), ": another digest came between"));
    }
    const Rank of((keeper + all - ranks.per_host) % all);
    if (plan.PlaceOf(of).replica == 0) sum += said[keeper].digest();
  }
  whole.set_digest(sum);
  if (sum == digest) return whole;
  return absl::DataLossError("the digests of the copies do not add up to the job's; have the members' memory checked");
}

}  // namespace

void Worker::BeginCopies(const Entry& entry, const Task& task) {
  if (task.spec.copies < 2 || task.ranks.alone()) return;
  const v1::Assignment& assignment = entry.assignment;
  auto copies = std::make_shared<PeerCopies>(task.spec, task.plan, Epoch(assignment.epoch()), Rank(assignment.rank()),
                                             task.ranks, assignment.secret());
  MutexLock lock(mu_);
  std::vector<Kept>& all = copies_[task.spec.name];
  all.insert(all.begin(), Kept{std::move(copies)});
}

void Worker::DropCopies(const std::vector<v1::Assignment>& assignments) {
  const absl::Time now = MonotonicNow();
  for (auto job = copies_.begin(); job != copies_.end();) {
    const auto mine = std::find_if(assignments.begin(), assignments.end(),
                                   [&](const v1::Assignment& each) { return each.spec().name() == job->first; });
    const auto entry = jobs_.find(job->first);
    const bool there = mine != assignments.end() && entry != jobs_.end();
    std::vector<Kept>& all = job->second;
    const auto unwanted = [&](Kept& kept) {
      if (there) {
        kept.left = absl::InfiniteFuture();
        return !SameSecret(kept.copies->secret(), entry->second->assignment.secret());
      }
      kept.left = std::min(kept.left, now);
      return now - kept.left >= kKeepLeft;
    };
    all.erase(std::remove_if(all.begin(), all.end(), unwanted), all.end());
    job = all.empty() ? copies_.erase(job) : std::next(job);
  }
}

// All members have what they need of older epochs.
void Worker::EndCopies(const std::string& job, int64_t before) {
  MutexLock lock(mu_);
  const auto all = copies_.find(job);
  if (all == copies_.end()) return;
  std::vector<Kept>& kept = all->second;
  kept.erase(
      std::remove_if(kept.begin(), kept.end(), [&](const Kept& each) { return each.copies->epoch().value() < before; }),
      kept.end());
  if (kept.empty()) copies_.erase(all);
}

// Of a job that is at a later epoch: what is whole counts, until that one's is.
std::vector<v1::KeptCopies> Worker::Copies() const {
  std::vector<v1::KeptCopies> told;
  MutexLock lock(mu_);
  for (const auto& [job, all] : copies_) {
    for (const Kept& kept : all) {
      std::optional<v1::KeptCopies> copies = kept.copies->Told();
      if (!copies.has_value()) continue;
      told.push_back(*std::move(copies));
      break;
    }
  }
  return told;
}

absl::StatusOr<std::shared_ptr<PeerCopies>> Worker::FindCopies(const std::string& job, int64_t epoch,
                                                               absl::string_view secret) const {
  MutexLock lock(mu_);
  if (const auto all = copies_.find(job); all != copies_.end()) {
    for (const Kept& kept : all->second) {
      if (kept.copies->epoch().value() != epoch) continue;
      if (SameSecret(kept.copies->secret(), secret)) return kept.copies;
      return absl::PermissionDeniedError(absl::StrCat("the caller does not show the secret of job ", job,
                                                      "; only its members, which the coordinator tells it, may ask"));
    }
  }
  return absl::NotFoundError(absl::StrCat("worker ", options_.name, " keeps no copies of epoch ", epoch, " of job \"",
                                          job.substr(0, 200), "\""));
}

absl::Status Worker::Copy(const v1::CopyRequest& request, const std::atomic<bool>& cancelled,
                          const ReportProgress& report) {
  ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, Find(request.job()));
  RETURN_IF_ERROR(shard->protocol().members().CheckEpoch(request.epoch()));
  absl::StatusOr<std::shared_ptr<PeerCopies>> copies = FindCopies(request.job(), request.epoch(), request.secret());
  if (absl::IsNotFound(copies.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", request.job(), " keeps no copies: it has no copies=2, or is on one host"));
  }
  RETURN_IF_ERROR(copies.status());
  if (request.has_whole()) {
    if (!(*copies)->SetWhole(request.whole())) {
      return absl::FailedPreconditionError(absl::StrCat("worker ", options_.name, " has no copies of step ",
                                                        request.whole().step(), ": it started anew since"));
    }
    EndCopies(request.job(), request.epoch());
    v1::FileProgress known;
    known.set_step(request.whole().step());
    return report(known);
  }
  std::shared_ptr<Entry> entry;
  {
    MutexLock lock(mu_);
    const auto found = jobs_.find(request.job());
    if (found != jobs_.end() && found->second->assignment.epoch() == request.epoch()) entry = found->second;
  }
  if (entry == nullptr) return absl::AbortedError(absl::StrCat("epoch ", request.epoch(), " is over"));
  return CopyShards({*shard, **copies, entry->assignment, options_.transfer, cancelled, report});
}

void Worker::RunCopies(const std::shared_ptr<Entry>& entry, JobShard& shard) {
  const v1::Assignment& assignment = entry->assignment;
  const auto copies = FindCopies(assignment.spec().name(), assignment.epoch(), assignment.secret());
  if (!copies.ok() || options_.copy == nullptr) return;
  v1::CopyRequest request;
  request.set_job(assignment.spec().name());
  request.set_epoch(assignment.epoch());
  request.set_secret(assignment.secret());
  const auto over = [&] { return entry->closing.load() || !shard.Health().ok(); };
  int64_t copied = kNoStep;
  const absl::Duration timeout = options_.prepare_timeout + TransferTime(StorageBytesOfAll(shard.plan()));
  v1::CopyRequest tell;  // of the newest whole step
  absl::Time next_tell = absl::InfiniteFuture();
  absl::Duration least = absl::InfiniteDuration();  // that a digest took of late; most also waited for a step's end
  bool failing = false;
  const auto rest = [&](absl::Duration longest) {
    for (const absl::Time until = MonotonicNow() + longest; MonotonicNow() < until && !entry->closing.load();) {
      absl::SleepFor(std::min(kLook, longest));
    }
  };
  // Until all know: who does not would give the step's copies up for those of the next round, and others have no older.
  const auto tell_all = [&](const v1::CopyRequest& tell) -> absl::Status {
    while (true) {
      MemberCalls told(options_.copy, assignment, tell, kTell);
      if (told.AwaitEnded(over) || over()) return told.error();
      if (absl::IsFailedPrecondition(told.error())) return told.error();
      rest(kAgain);
    }
  };
  const auto round = [&](absl::Duration& took) -> absl::Status {
    v1::WholeCopies whole;
    {
      MemberCalls calls(options_.copy, assignment, request, timeout);
      if (!calls.AwaitTold(over)) return calls.error();
      const absl::Time begin = MonotonicNow();
      const auto digest = DigestNow(shard, [&] { return over() || !calls.error().ok(); });
      took = MonotonicNow() - begin;
      if (!digest.has_value() || !calls.AwaitEnded(over)) return calls.error();
      ASSIGN_OR_RETURN(whole, WholeOf(shard.plan(), entry->ranks, calls.last(), digest->second));
    }
    tell = request;
    *tell.mutable_whole() = whole;
    RETURN_IF_ERROR(tell_all(tell));
    copied = whole.step();
    return absl::OkStatus();
  };
  while (!entry->closing.load()) {
    if (over() || shard.protocol().committed_step().value() <= copied) {
      rest(kLook);
      if (MonotonicNow() < next_tell || over()) continue;
      // Without a step since: a member whose next incarnation came has lost its copies, and says so.
      next_tell = MonotonicNow() + kTellAgain;
      if (absl::IsFailedPrecondition(tell_all(tell))) copied = kNoStep;
      continue;
    }
    absl::Duration took;
    const absl::Status status = round(took);
    if (!status.ok() && !over()) {
      if (!std::exchange(failing, true)) {
        spdlog::warn("event=copies_fail job={} epoch={} error=\"{}\"", request.job(), request.epoch(),
                     status.ToString());
      }
      rest(kAgain);
      continue;
    }
    if (status.ok() && std::exchange(failing, false)) {
      spdlog::info("event=copies_again job={} epoch={} step={}", request.job(), request.epoch(), copied);
    }
    next_tell = MonotonicNow() + kTellAgain;
    Changed();  // the coordinator hears of it at once
    least = std::min(took, least * 1.25);
    rest(std::clamp(least * kShare, kShortestPause, kLongestPause));
  }
}

}  // namespace shardmesh
