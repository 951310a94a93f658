// Of StepProtocol: what the lead decides and commits, and what comes of it: publications and digests.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/futex.h"
#include "worker/control/residency.h"
#include "worker/step/decide.h"
#include "worker/step/gradient_norm.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often
}  // namespace

bool StepProtocol::MoreFollows() const { return shardmesh::MoreFollows(ReadCommitted(*control_), *job_, *plan_); }

bool StepProtocol::Decide() {
  if (control_->abort.load() != 0) return false;
  const Facts facts = ReadFacts(*control_, *job_, *plan_, local_);
  const std::optional<Command> command = shardmesh::Decide(facts, *job_, *plan_);
  if (!command.has_value()) return false;
  switch (PublishesOf(*command)) {
    case Publishes::kNothing:
      return Issue(*command, facts, command->publish);
    case Publishes::kItsVersion:
      return Issue(*command, facts, publications_.Reserve(command->first != 0 ? 0 : command->step));
    case Publishes::kForSure:
      break;
  }
  // The version may be there already, or no publication free.
  const bool there = publications_.Find(Step(command->step)).has_value();
  const int publication = there ? -1 : publications_.ReserveAny();
  if (publication >= 0) return Issue(*command, facts, publication);
  AnswerPublish(facts.publish_ticket, there ? command->step : -1);
  return false;
}

bool StepProtocol::WriteScalars(const Command& command, const Facts& facts) {
  for (int g = 0; g < job_->num_groups(); ++g) {
    OptimizerHyper hyper = job_->group(g);
    hyper.lr = facts.learning_rates[g];
    auto scalars = ComputeStepScalars(hyper, command.step);  // validated when it was claimed
    if (!scalars.ok()) return false;
    groups_.scalars(command.groups)[g] = *scalars;
    groups_.rates(command.groups)[g] = hyper.lr;
  }
  return true;
}

bool StepProtocol::Issue(Command command, const Facts& facts, int publication) {
  if (control_->abort.load() != 0) return false;
  if (command.kind == CommandKind::kStep && !WriteScalars(command, facts)) return false;
  command.publish = publication;
  control_->commands[(decided() + 1) % 2] = command;
  const bool first = command.first != 0 && command.kind != CommandKind::kQuantize;
  if (first || (command.kind == CommandKind::kStep && command.apply != 0)) {
    std::atomic<uint32_t>* const maxima = Maxima(control_, *plan_);
    const int64_t count = first ? plan_->num_maxima() : plan_->num_stepped_maxima();
    for (int64_t i = 0; i < count; ++i) maxima[i].store(0, std::memory_order_relaxed);
  }
  Reach(FaultPoint::kCommandWritten);
  control_->decided.fetch_add(1, std::memory_order_release);
  Reach(FaultPoint::kDecided);
  FutexBump(control_->decision);
  return true;
}

void StepProtocol::Done(Rank rank, uint64_t seq) {
  control_->members[rank.value()].done.store(seq, std::memory_order_release);
  Reach(FaultPoint::kDone);
  FutexBump(*notifier_);
}

bool StepProtocol::AwaitGradients(Step step, int bucket) const {
  const uint64_t needed = BucketWord(static_cast<uint64_t>(step.value()), bucket + 1);
  while (true) {
    const uint32_t word = control_->decision.load(std::memory_order_acquire);
    if (Reaches(control_->gradients_here.load(std::memory_order_acquire), needed)) return true;
    if (control_->abort.load() != 0) return false;
    FutexWait(control_->decision, word, kSlice);
  }
}

void StepProtocol::GradientsHere(Step step, int buckets) {
  control_->gradients_here.store(BucketWord(static_cast<uint64_t>(step.value()), buckets), std::memory_order_release);
  FutexBump(control_->decision);
}

void StepProtocol::BucketsDone(Rank rank, uint64_t seq, int buckets) {
  control_->members[rank.value()].buckets_done.store(BucketWord(seq, buckets), std::memory_order_release);
  FutexBump(*notifier_);
}

bool StepProtocol::AllBucketsDone(uint64_t seq, int buckets) const {
  for (int r = local_.first(); r < local_.end(); ++r) {
    const MemberWords& member = control_->members[r];
    if (member.done.load(std::memory_order_acquire) >= seq) continue;  // one that has no part of any bucket, too
    if (!Reaches(member.buckets_done.load(std::memory_order_acquire), BucketWord(seq, buckets))) return false;
  }
  return true;
}

bool StepProtocol::AllDone() const {
  const uint64_t seq = decided();
  for (int r = local_.first(); r < local_.end(); ++r) {
    if (control_->members[r].done.load(std::memory_order_acquire) != seq) return false;
  }
  return true;
}

std::vector<int> StepProtocol::NotDone() const {
  std::vector<int> ranks;
  for (int r = local_.first(); r < local_.end(); ++r) {
    if (control_->members[r].done.load(std::memory_order_acquire) != decided()) ranks.push_back(r);
  }
  return ranks;
}

// Of the replicas of a shard, the first with the digest that most of them have.
int StepProtocol::RankOfMost(int shard) const {
  const auto digest = [&](int replica) {
    return control_->members[plan_->RankOf({shard, replica}).value()].digest.load(std::memory_order_acquire);
  };
  int best = 0, most = 0;
  for (int replica = 0; replica < plan_->num_replicas(); ++replica) {
    int same = 0;
    for (int other = 0; other < plan_->num_replicas(); ++other) same += digest(other) == digest(replica);
    if (same > most) best = replica;
    most = std::max(most, same);
  }
  return plan_->RankOf({shard, best}).value();
}

// Adds one replica of every shard up, and compares the others with it.
void StepProtocol::SummarizeDigest() {
  uint64_t sum = 0, differs = 0;
  for (int shard = 0; shard < plan_->num_shards(); ++shard) {
    const int most = RankOfMost(shard);
    sum += control_->members[most].digest.load(std::memory_order_acquire);
    for (int replica = 0; replica < plan_->num_replicas(); ++replica) {
      const int other = plan_->RankOf({shard, replica}).value();
      if (control_->members[other].digest.load() == control_->members[most].digest.load()) continue;
      if (differs == 0) differs = static_cast<uint64_t>(most + 1) << 32 | static_cast<uint64_t>(other + 1);
      if (job_->check_every > 0) Abort(AbortReason::kDiffers, other, Rank(most));
    }
  }
  control_->digest_writing.store(control_->digest_writing.load() | 1);  // odd already if the last incarnation was at it
  control_->digest_value.store(sum);
  control_->digest_step.store(command().step);
  control_->digest_differs.store(differs);
  control_->digest_writing.fetch_add(1);
  control_->digest_done.store(static_cast<uint64_t>(command().nonfinite));
}

void StepProtocol::RecordOutcome(const Command& command) {
  OutcomeWords& outcome = control_->outcomes[command.step % kOutcomeRing];
  const bool skipped = command.kind == CommandKind::kStep && !command.apply;
  outcome.step.store(kNoStep, std::memory_order_release);
  Reach(FaultPoint::kOutcomeOpen);
  outcome.skipped.store(skipped ? command.nonfinite + 1 : 0, std::memory_order_release);
  const bool normed = control_->norm_step.load(std::memory_order_acquire) == command.step;
  outcome.norm.store(normed ? control_->norm.load(std::memory_order_acquire) : 0, std::memory_order_release);
  outcome.peak.store(BitsOf(control_->pull.peak.load(), command.step), std::memory_order_release);
  outcome.step.store(command.step, std::memory_order_release);
}

void StepProtocol::CommitStep(const Command& command) {
  const bool restored = control_->restored_step_plus_one.load(std::memory_order_acquire) == command.step + 1;
  if (!restored) RecordOutcome(command);  // else it came with the shards
  if (command.publish >= 0) publications_.Show(command.publish, command.step);
  for (int s = 0; s < job_->num_slots; ++s) control_->elsewhere[s].gradient_shards.store(0);
  control_->committed_step_plus_one.store(command.step + 1, std::memory_order_release);
  Reach(FaultPoint::kStepCommitted);
  if (command.publish >= 0) publications_.Notify();
}

void StepProtocol::Commit() {
  const Command& command = this->command();
  if (command.kind == CommandKind::kDigest) {
    SummarizeDigest();
  } else if (command.kind == CommandKind::kNorm) {
    control_->norm.store(GradientNorm(*job_, *plan_, SquareSums(control_)), std::memory_order_release);
    control_->norm_step.store(command.step, std::memory_order_release);
  } else if (command.kind == CommandKind::kPublish) {
    publications_.Show(command.publish, command.step);
    publications_.Notify();
    AnswerPublish(static_cast<uint64_t>(command.nonfinite), command.step);
  } else if (command.kind == CommandKind::kGatherBucket) {
    BucketWords& words = ResidencyTable(control_, *plan_).bucket(command.bucket);
    if (words.lent.load() == 0) words.held.store(1);
  } else if (command.kind == CommandKind::kReduceBucket) {
    ResidencyTable(control_, *plan_).bucket(command.bucket).reduced.store(command.step, std::memory_order_release);
  } else if (command.kind == CommandKind::kMerge) {
    Pulled().Merged({command.first_slot, command.num_slots}, command.partial);
  } else {
    if (command.kind == CommandKind::kStep && command.apply) control_->parity.store(1 - command.parity);
    Reach(FaultPoint::kParityTurned);
    // In a repeated commit the step may count already: peers read its outcome.
    const bool whole = !QuantizeFollows(ReadCommitted(*control_), *plan_);
    if (whole && committed_step().value() < command.step) CommitStep(command);
  }
  control_->committed.store(decided(), std::memory_order_release);
  Reach(FaultPoint::kCommitted);
  FutexBump(control_->finished);
}

uint64_t StepProtocol::AskForDigest() {
  const uint64_t ticket = control_->digest_wanted.fetch_add(1) + 1;
  FutexBump(*notifier_);
  return ticket;
}

absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> StepProtocol::DigestOf(uint64_t ticket) const {
  const uint64_t writing = control_->digest_writing.load();
  const bool done = control_->digest_done.load() >= ticket && writing % 2 == 0;
  const Step step(control_->digest_step.load());
  const uint64_t value = control_->digest_value.load(), differs = control_->digest_differs.load();
  if (!done || control_->digest_writing.load() != writing) {  // not yet, or a newer one is just being written
    RETURN_IF_ERROR(Health());
    return std::optional<std::pair<Step, uint64_t>>();
  }
  if (differs == 0) return std::make_optional(std::make_pair(step, value));
  const int a = static_cast<int>(differs >> 32) - 1, b = static_cast<int>(differs & 0xffffffff) - 1;
  return absl::DataLossError(absl::StrCat("replicas differ at step ", step.value(), ": worker ", names_[a], " (rank ",
                                          a, ") and worker ", names_[b], " (rank ", b,
                                          ") hold the same shard with other bits; check their memory"));
}

uint64_t StepProtocol::AskToPublish() {
  const uint64_t ticket = control_->publish_wanted.fetch_add(1) + 1;
  FutexBump(*notifier_);
  return ticket;
}

void StepProtocol::AnswerPublish(uint64_t ticket, int64_t step) {
  control_->publish_step.store(step);
  control_->publish_done.store(ticket);
  FutexBump(control_->finished);
}

absl::StatusOr<std::optional<Step>> StepProtocol::PublishedFor(uint64_t ticket) const {
  if (control_->publish_done.load() < ticket) return std::optional<Step>();
  const Step step(control_->publish_step.load());
  if (step.value() >= 0) return std::make_optional(step);
  return absl::ResourceExhaustedError(absl::StrCat(
      "job ", job_->name, " has ", job_->publications, " publications, and all are held: ", publications_.Holders(),
      "; readers must release a version first (shardctl leases ", job_->name, "), or the job needs more publications"));
}

}  // namespace shardmesh
