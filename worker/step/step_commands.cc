#include "worker/step/step_commands.h"

#include <algorithm>

#include "core/base/fault_point.h"
#include "local/memory/futex.h"
#include "worker/control/residency.h"
#include "worker/step/gradient_norm.h"
#include "worker/step/step_outcomes.h"
#include "worker/step/step_tickets.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often
}  // namespace

bool StepCommands::WriteScalars(const Command& command, const Facts& facts) const {
  for (int g = 0; g < view_.job->num_groups(); ++g) {
    OptimizerHyper hyper = view_.job->group(g);
    hyper.lr = facts.learning_rates[g];
    auto scalars = ComputeStepScalars(hyper, command.step);  // validated when it was claimed
    if (!scalars.ok()) return false;
    view_.Groups().scalars(command.groups)[g] = *scalars;
    view_.Groups().rates(command.groups)[g] = hyper.lr;
  }
  return true;
}

bool StepCommands::Issue(Command command, const Facts& facts, int publication) const {
  if (view_.control->abort.load() != 0) return false;
  if (command.kind == CommandKind::kStep && !WriteScalars(command, facts)) return false;
  command.publish = publication;
  view_.control->commands[(view_.decided() + 1) % 2] = command;
  const bool first = command.first != 0 && command.kind != CommandKind::kQuantize;
  if (first || (command.kind == CommandKind::kStep && command.apply != 0)) {
    std::atomic<uint32_t>* const maxima = Maxima(view_.control, *view_.plan);
    const int64_t count = first ? view_.plan->scales().num_maxima : view_.plan->scales().num_stepped_maxima;
    for (int64_t i = 0; i < count; ++i) maxima[i].store(0, std::memory_order_relaxed);
  }
  Reach(FaultPoint::kCommandWritten);
  view_.control->decided.fetch_add(1, std::memory_order_release);
  Reach(FaultPoint::kDecided);
  FutexBump(view_.control->decision);
  return true;
}

void StepCommands::Done(Rank rank, uint64_t seq) const {
  view_.control->members[rank.value()].done.store(seq, std::memory_order_release);
  Reach(FaultPoint::kDone);
  FutexBump(*view_.notifier);
}

bool StepCommands::AwaitGradients(Step step, int bucket) const {
  const uint64_t needed = BucketWord(static_cast<uint64_t>(step.value()), bucket + 1);
  while (true) {
    const uint32_t word = view_.control->decision.load(std::memory_order_acquire);
    if (Reaches(view_.control->gradients_here.load(std::memory_order_acquire), needed)) return true;
    if (view_.control->abort.load() != 0) return false;
    FutexWait(view_.control->decision, word, kSlice);
  }
}

void StepCommands::GradientsHere(Step step, int buckets) const {
  view_.control->gradients_here.store(BucketWord(static_cast<uint64_t>(step.value()), buckets),
                                      std::memory_order_release);
  FutexBump(view_.control->decision);
}

void StepCommands::BucketsDone(Rank rank, uint64_t seq, int buckets) const {
  view_.control->members[rank.value()].buckets_done.store(BucketWord(seq, buckets), std::memory_order_release);
  FutexBump(*view_.notifier);
}

bool StepCommands::AllBucketsDone(uint64_t seq, int buckets) const {
  for (int r = view_.local.first(); r < view_.local.end(); ++r) {
    const MemberWords& member = view_.control->members[r];
    if (member.done.load(std::memory_order_acquire) >= seq) continue;  // one that has no part of any bucket, too
    if (!Reaches(member.buckets_done.load(std::memory_order_acquire), BucketWord(seq, buckets))) return false;
  }
  return true;
}

bool StepCommands::AllDone() const {
  const uint64_t seq = view_.decided();
  for (int r = view_.local.first(); r < view_.local.end(); ++r) {
    if (view_.control->members[r].done.load(std::memory_order_acquire) != seq) return false;
  }
  return true;
}

std::vector<int> StepCommands::NotDone() const {
  std::vector<int> ranks;
  for (int r = view_.local.first(); r < view_.local.end(); ++r) {
    if (view_.control->members[r].done.load(std::memory_order_acquire) != view_.decided()) ranks.push_back(r);
  }
  return ranks;
}

void StepCommands::CommitStep(const Command& command) const {
  const bool restored = view_.control->restored_step_plus_one.load(std::memory_order_acquire) == command.step + 1;
  if (!restored) StepOutcomes(view_).Record(command);  // else it came with the shards
  if (command.publish >= 0) publications_.Show(command.publish, command.step);
  for (int s = 0; s < view_.job->num_slots; ++s) view_.control->elsewhere[s].gradient_shards.store(0);
  view_.control->committed_step_plus_one.store(command.step + 1, std::memory_order_release);
  Reach(FaultPoint::kStepCommitted);
  if (command.publish >= 0) publications_.Notify();
}

void StepCommands::Commit() const {
  const Command& command = view_.command();
  if (command.kind == CommandKind::kDigest) {
    StepTickets(view_, publications_).SummarizeDigest();
  } else if (command.kind == CommandKind::kNorm) {
    view_.control->norm.store(GradientNorm(*view_.job, *view_.plan, SquareSums(view_.control)),
                              std::memory_order_release);
    view_.control->norm_step.store(command.step, std::memory_order_release);
  } else if (command.kind == CommandKind::kPublish) {
    publications_.Show(command.publish, command.step);
    publications_.Notify();
    StepTickets(view_, publications_).AnswerPublish(static_cast<uint64_t>(command.nonfinite), command.step);
  } else if (command.kind == CommandKind::kGatherBucket) {
    BucketWords& words = ResidencyTable(view_.control, *view_.plan).bucket(command.bucket);
    if (words.lent.load() == 0) words.held.store(kBucketHeld);
  } else if (command.kind == CommandKind::kReduceBucket) {
    ResidencyTable(view_.control, *view_.plan)
        .bucket(command.bucket)
        .reduced.store(command.step, std::memory_order_release);
  } else if (command.kind == CommandKind::kMerge) {
    view_.Pulled().Merged({command.first_slot, command.num_slots}, command.partial);
  } else {
    if (command.kind == CommandKind::kStep && command.apply) view_.control->parity.store(1 - command.parity);
    Reach(FaultPoint::kParityTurned);
    // In a repeated commit the step may count already: peers read its outcome.
    const bool whole = !QuantizeFollows(ReadCommitted(*view_.control), *view_.plan);
    if (whole && view_.committed_step().value() < command.step) CommitStep(command);
  }
  view_.control->committed.store(view_.decided(), std::memory_order_release);
  Reach(FaultPoint::kCommitted);
  FutexBump(view_.control->finished);
}

void StepCommands::InitialShardReady(Rank rank, uint64_t push_id) const {
  view_.control->members[rank.value()].initial_id.store(push_id, std::memory_order_release);
  FutexBump(*view_.notifier);
}

void StepCommands::LoadedReady(Rank rank, uint64_t load_id, Step step) const {
  view_.control->members[rank.value()].loaded_step.store(step.value(), std::memory_order_release);
  view_.control->members[rank.value()].loaded_id.store(load_id, std::memory_order_release);
  FutexBump(*view_.notifier);
}

}  // namespace shardmesh
