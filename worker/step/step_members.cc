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
  view_.control->members[rank.value()].retained.store(retained ? 1 : 0,
                                                      std::memory_order_release);  // then: who is kept can be silent
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

absl::Status StepMembers::Health() const {
  const uint64_t word = view_.control->abort.load(std::memory_order_acquire);
  if (word == 0) return absl::OkStatus();
  const int about = AboutOf(word);
  std::string saw = "failed", remedy = "delete the job and create it again";
  if (Lost().has_value() && view_.local.num_hosts == 1 && view_.plan->num_replicas() > 1) {
    remedy = "open the job again: where the others have a copy of each shard it goes on without that worker";
  }
  std::string seen = absl::StrCat(", seen by rank ", ReporterOf(word));
  absl::StatusCode code = absl::StatusCode::kUnavailable;
  switch (ReasonOf(word)) {
    case AbortReason::kSilent:
      saw = "gave no sign of life within the heartbeat time-out (killed or stopped)";
      break;
    case AbortReason::kGone:
      saw = "is gone (its connection closed)";
      break;
    case AbortReason::kLate:
      saw = "did not finish its part of the step within the time limit";
      break;
    case AbortReason::kLeft:
      saw = "left (it was told to stop)";
      break;
    case AbortReason::kUnreachable:
      saw = "is not reached by other hosts any more (killed or stopped, or the link between them broke)";
      break;
    case AbortReason::kNotMet:
      saw = absl::StrCat("could not meet the workers of other hosts: ", CauseOf());
      break;
    case AbortReason::kBadFacts:
      saw = absl::StrCat("said for its host what cannot be: ", CauseOf());
      remedy = "check that all workers are of one build, then delete the job and create it again";
      break;
    case AbortReason::kReformed:
      saw = "goes on at a later epoch, since a member was lost or it was brought to another mesh";
      seen = "";
      remedy = "open the job again";
      break;
    case AbortReason::kInternal:
      saw = "met an internal error (see its log)";
      break;
    case AbortReason::kDevice:
      saw = absl::StrCat("could not finish its part of the step on CUDA device ", DeviceOf(word), " (see its log)");
      remedy = "restart that worker, then delete the job and create it again";
      break;
    case AbortReason::kDamaged:
      code = absl::StatusCode::kDataLoss;
      saw = absl::StrCat("found silent corruption (", DamageOf(about), ")");
      remedy = "have its machine's memory and processor checked, then delete the job and create it again";
      break;
    case AbortReason::kDiffers:
      code = absl::StatusCode::kDataLoss;
      saw = DifferenceFrom(ReporterOf(word));
      seen = "";
      remedy = absl::StrCat(view_.plan->num_replicas() > 2 ? "have its machine's memory and processor checked"
                                                           : "one of the two is wrong: have both machines checked",
                            ", then delete the job and create it again");
      break;
  }
  // The word may be another host's: it may name ranks that the job does not have.
  const std::string who = about < view_.plan->num_ranks()
                              ? absl::StrCat("worker ", view_.names[about], " (rank ", about, ", pid ",
                                             view_.control->members[about].pid.load(), ")")
                              : absl::StrCat("rank ", about, ", which is none of ", view_.plan->num_ranks(), ",");
  return absl::Status(code,
                      absl::StrCat(who, " of job ", view_.job->name, " ", saw, seen, "; the last committed step is ",
                                   view_.committed_step().value(), "; ", remedy));
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
  const bool writes =
      view_.decided() != view_.committed() || QuantizeFollows(ReadCommitted(*view_.control), *view_.plan);
  publications.TakeOver(self == view_.local.first(), writes ? view_.command().publish : -1);
  TakeOverMember(view_.control->members[self]);
  StepBuckets(view_).TakeOverUses();
  if (view_.plan->pulled() && self == view_.local.first()) view_.Pulled().EndTakes(MonotonicNanos());
  if (self == view_.local.first() && view_.control->taking_messages.load() % 2 == 1)
    view_.control->taking_messages.fetch_add(1);
}

void StepMembers::TakeOverMember(MemberWords& words) const {
  // Gradient shards of initial weights were in the process: nobody else has this one. What was loaded lies in the
  // storage.
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
