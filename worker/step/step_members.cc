#include "worker/step/step_members.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/plain_text.h"
#include "local/memory/futex.h"
#include "worker/control/damage.h"
#include "worker/step/facts.h"
#include "worker/step/step_buckets.h"

namespace shardmesh {

void StepMembers::SignOfLife(Rank rank, int64_t now_nanos, int64_t pid, bool retained) const {
  view_.control->members[rank.value()].pid.store(pid, std::memory_order_relaxed);
  view_.control->members[rank.value()].alive_nanos.store(now_nanos, std::memory_order_release);
  // Behind the sign of life: whoever is retained may be silent.
  view_.control->members[rank.value()].retained.store(retained ? 1 : 0, std::memory_order_release);
}

bool StepMembers::ComesBack(int rank) const { return view_.control->members[rank].retained.load() != 0; }

void StepMembers::CheckPeers(Rank self, int64_t now_nanos, absl::Duration timeout) const {
  for (int r = 0; r < view_.plan->num_ranks(); ++r) {
    const int64_t alive = view_.control->members[r].alive_nanos.load(std::memory_order_acquire);
    if (r == self.value() || alive == 0) continue;
    if (now_nanos - alive > absl::ToInt64Nanoseconds(timeout)) Abort(AbortReason::kSilent, r, self);
  }
}

void StepMembers::Abort(AbortReason reason, int about, Rank reporter, int device) const {
  uint64_t none = 0;
  view_.control->abort.compare_exchange_strong(none, AbortWord(reason, about, reporter.value(), device));
  FutexBump(*view_.notifier);
  FutexBump(view_.control->decision);
  FutexBump(view_.control->finished);
}

void StepMembers::AbortFor(AbortReason reason, int about, absl::string_view cause) const {
  if (view_.control->abort.load() != 0) return;
  const std::string plain = PlainText(cause, kMaxCause - 1);
  plain.copy(view_.control->cause, plain.size());
  view_.control->cause[plain.size()] = 0;
  Abort(reason, about, Rank(view_.local.first()));
}

std::string StepMembers::CauseOf() const {
  return view_.control->cause[0] == 0 ? "see its log"
                                      : std::string(view_.control->cause, strnlen(view_.control->cause, kMaxCause));
}

std::string StepMembers::DamageOf(int rank) const {
  const Damage damage = Damage::Of(rank < view_.plan->num_ranks() ? view_.control->members[rank].damage.load() : 0);
  return damage.what == Damage::kNone ? "see its log" : damage.ToString(*view_.job);
}

// What the replicas' comparison after the last committed step has found, and since when it may be so.
std::string StepMembers::DifferenceFrom(int rank) const {
  const int64_t step = view_.committed_step().value(), every = std::max(view_.job->check_every, 1);
  return absl::StrCat("holds the same shard as ", rank < view_.plan->num_ranks() ? view_.names[rank] : "?", " (rank ",
                      rank, ") with other bits at step ", step, ": versions after step ",
                      std::max<int64_t>(step - 1, 0) / every * every, ", when they were equal, may be wrong");
}

std::optional<Rank> StepMembers::Lost() const {
  const uint64_t word = view_.control->abort.load(std::memory_order_acquire);
  const AbortReason reason = ReasonOf(word);
  const bool ended = reason == AbortReason::kSilent || reason == AbortReason::kGone || reason == AbortReason::kLeft ||
                     reason == AbortReason::kUnreachable;
  if (word == 0 || !ended || AboutOf(word) >= view_.plan->num_ranks()) return std::nullopt;
  return Rank(AboutOf(word));
}

// What the reporter saw of the member that the abort is about.
std::string StepMembers::SawOf(uint64_t word) const {
  switch (ReasonOf(word)) {
    case AbortReason::kSilent:
      return "gave no sign of life within the heartbeat time-out (killed or stopped)";
    case AbortReason::kGone:
      return "is gone (its connection closed)";
    case AbortReason::kLate:
      return "did not finish its part of the step within the time limit";
    case AbortReason::kLeft:
      return "left (it was told to stop)";
    case AbortReason::kUnreachable:
      return "is not reached by other hosts any more (killed or stopped, or the link between them broke)";
    case AbortReason::kNotMet:
      return absl::StrCat("could not meet the workers of other hosts: ", CauseOf());
    case AbortReason::kBadFacts:
      return absl::StrCat("said for its host what cannot be: ", CauseOf());
    case AbortReason::kReformed:
      return "goes on at a later epoch, since a member was lost or it was brought to another mesh";
    case AbortReason::kInternal:
      return "met an internal error (see its log)";
    case AbortReason::kDevice:
      return absl::StrCat("could not finish its part of the step on CUDA device ", DeviceOf(word), " (see its log)");
    case AbortReason::kDamaged:
      return absl::StrCat("found silent corruption (", DamageOf(AboutOf(word)), ")");
    case AbortReason::kDiffers:
      return DifferenceFrom(ReporterOf(word));
  }
  return "failed";
}

// What whoever reads the error is to do.
std::string StepMembers::RemedyOf(uint64_t word) const {
  constexpr char kAgain[] = "delete the job and create it again";
  constexpr char kCheckOne[] = "have its machine's memory and processor checked";
  switch (ReasonOf(word)) {
    case AbortReason::kBadFacts:
      return absl::StrCat("check that all workers are of one build, then ", kAgain);
    case AbortReason::kReformed:
      return "open the job again";
    case AbortReason::kDevice:
      return absl::StrCat("restart that worker, then ", kAgain);
    case AbortReason::kDamaged:
      return absl::StrCat(kCheckOne, ", then ", kAgain);
    case AbortReason::kDiffers:
      return absl::StrCat(
          view_.plan->num_replicas() > 2 ? kCheckOne : "one of the two is wrong: have both machines checked", ", then ",
          kAgain);
    default:
      break;
  }
  if (!Lost().has_value()) return kAgain;
  const bool copies = view_.job->copies > 1 && !view_.local.alone();
  const bool goes_back = view_.job->on_loss == OnLoss::kCheckpoint;
  const std::string from = copies      ? "from the newest step of which other hosts have copies"
                           : goes_back ? "from its newest checkpoint"
                                       : "";
  if (view_.plan->num_replicas() > 1) {
    return absl::StrCat("open the job again: where the others have a copy of each shard it goes on without that worker",
                        from.empty() ? "" : ", and else ", from);
  }
  return from.empty() ? std::string(kAgain) : absl::StrCat("open the job again: it continues ", from);
}

// The word may be another host's: it may name ranks that the job does not have.
std::string StepMembers::MemberAt(int rank) const {
  if (rank >= view_.plan->num_ranks()) {
    return absl::StrCat("rank ", rank, ", which is none of ", view_.plan->num_ranks(), ",");
  }
  return absl::StrCat("worker ", view_.names[rank], " (rank ", rank, ", pid ", view_.control->members[rank].pid.load(),
                      ")");
}

absl::Status StepMembers::CheckEpoch(int64_t epoch) const {
  if (epoch == view_.epoch.value()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("epoch ", epoch, " of job ", view_.job->name, " is not the current one, ",
                                         view_.epoch.value(), "; open the job again"));
}

absl::Status StepMembers::Health() const {
  const uint64_t word = view_.control->abort.load(std::memory_order_acquire);
  if (word == 0) return absl::OkStatus();
  const AbortReason reason = ReasonOf(word);
  const bool corrupt = reason == AbortReason::kDamaged || reason == AbortReason::kDiffers;
  const bool names_reporter = reason != AbortReason::kReformed && reason != AbortReason::kDiffers;
  return absl::Status(corrupt ? absl::StatusCode::kDataLoss : absl::StatusCode::kUnavailable,
                      absl::StrCat(MemberAt(AboutOf(word)), " of job ", view_.job->name, " ", SawOf(word),
                                   names_reporter ? absl::StrCat(", seen by rank ", ReporterOf(word)) : "",
                                   "; the last committed step is ", view_.committed_step().value(), "; ",
                                   RemedyOf(word)));
}

void StepMembers::TakeOver(Publications& publications) const {
  const int self = view_.self.value();
  for (int s = 0; s < view_.job->num_writers(); ++s) {
    view_.control->slots[s].declaring[self].store(0);
    for (int p = 0; p < view_.plan->num_shards(); ++p) {
      int32_t mine = self + 1;
      view_.control->pushes[s][p].compare_exchange_strong(mine, 0);
    }
  }
  publications.TakeOver();
  // With other hosts the lead asks them first what was decided.
  if (self == 0 && view_.local.alone()) publications.KeepUnused(PublicationInUse());
  TakeOverMember(view_.control->members[self]);
  StepBuckets(view_).TakeOverUses();
  if (view_.plan->pulled() && self == view_.local.first()) view_.Pulled().EndTakes(MonotonicNanos());
  if (self == view_.local.first() && view_.control->taking_messages.load() % 2 == 1)
    view_.control->taking_messages.fetch_add(1);
}

int StepMembers::PublicationInUse() const {
  const bool writes =
      view_.decided() != view_.committed() || QuantizeFollows(ReadCommitted(*view_.control), *view_.plan);
  return writes ? view_.command().publish : -1;
}

void StepMembers::TakeOverMember(MemberWords& words) const {
  // Initial weights of this shard were in the process: nobody else has them. What was loaded lies in the storage.
  const bool placed = words.done.load() > 0;
  const bool loaded = view_.decided() > 0 && view_.command().kind == CommandKind::kRestore &&
                      view_.command().initial_id != 0 && view_.command().initial_id == words.loaded_id.load();
  const bool lost = !placed && ((view_.decided() > 0 && !loaded) || words.initial_id.load() != 0);
  // A command that ends every incarnation will end this one, too.
  const uint64_t open = view_.decided() != view_.committed() ? view_.decided() : 0;
  words.incarnations_in_command.store(
      open != 0 && words.incarnations_of.load() == open ? words.incarnations_in_command.load() + 1 : 1);
  words.incarnations_of.store(open);
  const bool hopeless = open != 0 && words.incarnations_in_command.load() > kMaxIncarnationsInCommand;
  if (lost || hopeless) Abort(AbortReason::kGone, view_.self.value(), view_.self);
}

void StepMembers::GoesOn(int64_t now_nanos, int64_t away_since_nanos) const {
  MemberWords& words = view_.control->members[view_.self.value()];
  words.pause_nanos.store(away_since_nanos == 0 ? 0 : std::max<int64_t>(now_nanos - away_since_nanos, 0));
  words.restarts.fetch_add(1);
}

}  // namespace shardmesh
