// Of StepProtocol: what the lead decides and commits, and what comes of it: publications and digests.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/futex.h"
#include "worker/control/residency.h"
#include "worker/step/gradient_norm.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often
}  // namespace

// The id that every member of this host says of itself; 0: they do not agree, or say none.
uint64_t StepProtocol::CommonId(std::atomic<uint64_t> MemberWords::*word) const {
  const uint64_t id = (page_->members[local_.first()].*word).load(std::memory_order_acquire);
  for (int r = local_.first(); r < local_.end(); ++r) {
    if ((page_->members[r].*word).load(std::memory_order_acquire) != id) return 0;
  }
  return id;
}

bool StepProtocol::SlotsComplete(int64_t step) const {
  if (plan_->bucketed()) return BucketsComplete(step);
  if (plan_->pulled()) return Pulled().Root() >= 0;
  for (int s = 0; s < job_->num_slots; ++s) {
    if (page_->slots[s].declared.load(std::memory_order_acquire) != step) return false;
    for (int p = 0; p < plan_->num_shards(); ++p) {
      if (page_->pieces[s][p].load(std::memory_order_acquire) != step) return false;
    }
  }
  return true;
}

// The buffer for this step's version: the one that holds the older version, unless somebody reads it: then this version
// is not published (training does not wait for readers).
// Whether the newest command wrote weights of which some are still to be gathered in codes; the page alone says so.
bool StepProtocol::GatherFollows() const {
  const Command& last = command();
  if (last.kind == CommandKind::kInit || last.kind == CommandKind::kRestore) return plan_->coded();
  return last.kind == CommandKind::kStep && last.apply != 0 && plan_->steps_coded();
}

// Whether the replicas of a job with check_every are to be compared before anything else.
bool StepProtocol::CompareFollows() const {
  const int64_t committed = committed_step().value();
  return job_->check_every > 0 && plan_->num_replicas() > 1 && committed > 0 && committed % job_->check_every == 0 &&
         page_->digest_step.load() != committed;
}

bool StepProtocol::MoreFollows() const {
  const int64_t committed = committed_step().value();
  return GatherFollows() || CompareFollows() ||
         (committed != kNoStep && page_->norm_step.load(std::memory_order_acquire) == committed + 1);
}

void StepProtocol::Issue(const Command& command) {
  page_->commands[(decided() + 1) % 2] = command;
  const bool first = command.first != 0 && command.kind != CommandKind::kGather;
  if (first || (command.kind == CommandKind::kStep && command.apply != 0)) {
    std::atomic<uint32_t>* const maxima = Maxima(page_, *plan_);
    const int64_t count = first ? plan_->num_maxima() : plan_->num_stepped_maxima();
    for (int64_t i = 0; i < count; ++i) maxima[i].store(0, std::memory_order_relaxed);
  }
  Reach(FaultPoint::kCommandWritten);
  page_->decided.fetch_add(1, std::memory_order_release);
  Reach(FaultPoint::kDecided);
  FutexBump(page_->decision);
}

Agreed StepProtocol::SeenHere() const {
  Agreed agreed;
  const int64_t committed = committed_step().value();
  agreed.digest_wanted = page_->digest_wanted.load() > page_->digest_done.load();
  if (committed == kNoStep) {
    agreed.initial_id = CommonId(&MemberWords::initial_id);
    return agreed;
  }
  agreed.slots_complete = SlotsComplete(committed + 1);
  if (!agreed.slots_complete) return agreed;
  for (int s = 0; s < job_->num_slots; ++s) {
    agreed.nonfinite[s] = page_->slots[s].nonfinite.load(std::memory_order_acquire);
  }
  const uint64_t claim = page_->settings_claim.load(std::memory_order_acquire);
  const GroupTable::Rate* const rates = ClaimedRates(claim);
  agreed.loss_scale = ClaimedLossScale(claim).load(std::memory_order_acquire);
  agreed.learning_rates.reserve(job_->num_groups());
  for (int g = 0; g < job_->num_groups(); ++g) {
    agreed.learning_rates.push_back(rates[g].load(std::memory_order_acquire));
  }
  return agreed;
}

// Fills in a step of which all slots are complete; or, before it, the norm of its gradients.
bool StepProtocol::DecideStep(const Agreed& agreed, Command& command) {
  command.kind = CommandKind::kStep;
  command.apply = 1;
  for (int s = 0; s < job_->num_slots && command.apply; ++s) {
    if (NonFiniteStepOf(agreed.nonfinite[s]) != command.step) continue;
    command.apply = 0;
    command.nonfinite = int64_t{s} << 32 | NonFiniteTensorOf(agreed.nonfinite[s]);
  }
  const double divisor = Divisor();
  if (divisor == 0 && command.apply) {
    command.apply = 0;
    command.nonfinite = kNoTokens;
  }
  command.divide_scale = divisor == 0 ? 0 : static_cast<float>(1 / (divisor * agreed.loss_scale));
  if (plan_->pulled()) command.partial = Pulled().Root();
  if (command.apply && job_->clip_norm > 0) {
    if (page_->norm_step.load(std::memory_order_acquire) != command.step) {
      command.kind = CommandKind::kNorm;
      return true;
    }
    command.clip = ClipFactor(job_->clip_norm, page_->norm.load(std::memory_order_acquire));
  }
  command.groups = static_cast<int32_t>((decided() + 1) % 2);  // where the newest command's are not
  for (int g = 0; g < job_->num_groups(); ++g) {
    OptimizerHyper hyper = job_->group(g);
    hyper.lr = agreed.learning_rates[g];
    auto scalars = ComputeStepScalars(hyper, command.step);  // validated when it was claimed
    if (!scalars.ok()) return false;
    groups_.scalars(command.groups)[g] = *scalars;
    groups_.rates(command.groups)[g] = hyper.lr;
  }
  if (command.apply) command.publish = agreed.publish ? *agreed.publish : publications_.Reserve(command.step);
  return true;
}

bool StepProtocol::AllRestored() const {
  for (int r = local_.first(); r < local_.end(); ++r) {
    if (page_->members[r].restored.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

// The weights that the job begins with at this epoch: initial ones, those of a checkpoint, or those that it had before.
// All are published.
bool StepProtocol::DecideFirst(const Agreed& agreed, Command& command) {
  const int64_t restored = page_->restored_step_plus_one.load(std::memory_order_acquire) - 1;
  const uint64_t loaded = local_.num_hosts == 1 ? CommonId(&MemberWords::loaded_id) : 0;
  if (restored != kNoStep) {
    if (!AllRestored()) return false;
    command.kind = CommandKind::kRestore;
    command.step = restored;
  } else if (loaded != 0) {
    command.kind = CommandKind::kRestore;
    command.initial_id = loaded;
    command.step = page_->members[local_.first()].loaded_step.load(std::memory_order_acquire);
  } else {
    command.kind = CommandKind::kInit;
    command.initial_id = agreed.initial_id;
    if (command.initial_id == 0) return false;
  }
  command.first = 1;
  command.publish = agreed.publish ? *agreed.publish : publications_.Reserve(0);
  return true;
}

bool StepProtocol::Decide() { return DecideBy(SeenHere()); }

bool StepProtocol::DecideBy(const Agreed& agreed) {
  if (page_->abort.load() != 0) return false;
  Command command;
  const int64_t committed = committed_step().value();
  command.step = committed + 1;
  command.parity = page_->parity.load(std::memory_order_acquire);
  const bool compare = CompareFollows();
  if (GatherFollows()) {  // first of all: what was decided is rolled forward
    command = this->command();
    command.kind = CommandKind::kGather;
    command.parity = page_->parity.load(std::memory_order_acquire);
  } else if (committed == kNoStep) {
    if (!DecideFirst(agreed, command)) return false;
  } else if (!compare && (DecideFill(command) || DecideReduce(command) || DecideMerge(command))) {
    command.publish = -1;
  } else if (!compare && agreed.slots_complete) {
    if (!DecideStep(agreed, command)) return false;
  } else if (compare || agreed.digest_wanted) {
    command.kind = CommandKind::kDigest;
    command.step = committed;
    command.nonfinite = static_cast<int64_t>(page_->digest_wanted.load());
  } else {
    command.step = committed;
    if (!DecidePublish(command)) return false;
  }
  Issue(command);
  return true;
}

void StepProtocol::Done(Rank rank, uint64_t seq) {
  page_->members[rank.value()].done.store(seq, std::memory_order_release);
  Reach(FaultPoint::kDone);
  FutexBump(*doorbell_);
}

bool StepProtocol::AwaitGradients(Step step, int bucket) const {
  const uint64_t needed = BucketWord(static_cast<uint64_t>(step.value()), bucket + 1);
  while (true) {
    const uint32_t word = page_->decision.load(std::memory_order_acquire);
    if (Reaches(page_->gradients_here.load(std::memory_order_acquire), needed)) return true;
    if (page_->abort.load() != 0) return false;
    FutexWait(page_->decision, word, kSlice);
  }
}

void StepProtocol::GradientsHere(Step step, int buckets) {
  page_->gradients_here.store(BucketWord(static_cast<uint64_t>(step.value()), buckets), std::memory_order_release);
  FutexBump(page_->decision);
}

void StepProtocol::BucketsDone(Rank rank, uint64_t seq, int buckets) {
  page_->members[rank.value()].buckets_done.store(BucketWord(seq, buckets), std::memory_order_release);
  FutexBump(*doorbell_);
}

bool StepProtocol::AllBucketsDone(uint64_t seq, int buckets) const {
  for (int r = local_.first(); r < local_.end(); ++r) {
    const MemberWords& member = page_->members[r];
    if (member.done.load(std::memory_order_acquire) >= seq) continue;  // one that has no part of any bucket, too
    if (!Reaches(member.buckets_done.load(std::memory_order_acquire), BucketWord(seq, buckets))) return false;
  }
  return true;
}

bool StepProtocol::AllDone() const {
  const uint64_t seq = decided();
  for (int r = local_.first(); r < local_.end(); ++r) {
    if (page_->members[r].done.load(std::memory_order_acquire) != seq) return false;
  }
  return true;
}

std::vector<int> StepProtocol::NotDone() const {
  std::vector<int> ranks;
  for (int r = local_.first(); r < local_.end(); ++r) {
    if (page_->members[r].done.load(std::memory_order_acquire) != decided()) ranks.push_back(r);
  }
  return ranks;
}

// Of the replicas of a shard, the first with the digest that most of them have.
int StepProtocol::RankOfMost(int shard) const {
  const auto digest = [&](int replica) {
    return page_->members[plan_->RankOf({shard, replica}).value()].digest.load(std::memory_order_acquire);
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
    sum += page_->members[most].digest.load(std::memory_order_acquire);
    for (int replica = 0; replica < plan_->num_replicas(); ++replica) {
      const int other = plan_->RankOf({shard, replica}).value();
      if (page_->members[other].digest.load() == page_->members[most].digest.load()) continue;
      if (differs == 0) differs = static_cast<uint64_t>(most + 1) << 32 | static_cast<uint64_t>(other + 1);
      if (job_->check_every > 0) Abort(AbortReason::kDiffers, other, Rank(most));
    }
  }
  page_->digest_writing.store(page_->digest_writing.load() | 1);  // odd already if the last life was at it
  page_->digest_value.store(sum);
  page_->digest_step.store(command().step);
  page_->digest_differs.store(differs);
  page_->digest_writing.fetch_add(1);
  page_->digest_done.store(static_cast<uint64_t>(command().nonfinite));
}

void StepProtocol::RecordOutcome(const Command& command) {
  OutcomeWords& outcome = page_->outcomes[command.step % kOutcomeRing];
  const bool skipped = command.kind == CommandKind::kStep && !command.apply;
  outcome.step.store(kNoStep, std::memory_order_release);
  Reach(FaultPoint::kOutcomeOpen);
  outcome.skipped.store(skipped ? command.nonfinite + 1 : 0, std::memory_order_release);
  const bool normed = page_->norm_step.load(std::memory_order_acquire) == command.step;
  outcome.norm.store(normed ? page_->norm.load(std::memory_order_acquire) : 0, std::memory_order_release);
  outcome.peak.store(BitsOf(page_->pull.peak.load(), command.step), std::memory_order_release);
  outcome.step.store(command.step, std::memory_order_release);
}

void StepProtocol::CommitStep(const Command& command) {
  const bool restored = page_->restored_step_plus_one.load(std::memory_order_acquire) == command.step + 1;
  if (!restored) RecordOutcome(command);  // else it came with the shards
  if (command.publish >= 0) publications_.Show(command.publish, command.step);
  for (int s = 0; s < job_->num_slots; ++s) page_->elsewhere[s].pieces.store(0);
  page_->committed_step_plus_one.store(command.step + 1, std::memory_order_release);
  Reach(FaultPoint::kStepCommitted);
  if (command.publish >= 0) publications_.Ring();
}

void StepProtocol::Commit() {
  const Command& command = this->command();
  if (command.kind == CommandKind::kDigest) {
    SummarizeDigest();
  } else if (command.kind == CommandKind::kNorm) {
    page_->norm.store(GradientNorm(*job_, *plan_, SquareSums(page_)), std::memory_order_release);
    page_->norm_step.store(command.step, std::memory_order_release);
  } else if (command.kind == CommandKind::kPublish) {
    publications_.Show(command.publish, command.step);
    publications_.Ring();
    AnswerPublish(static_cast<uint64_t>(command.nonfinite), command.step);
  } else if (command.kind == CommandKind::kFill) {
    ResidencyTable(page_, *plan_).bucket(command.bucket).held.store(1);
  } else if (command.kind == CommandKind::kReduce) {
    ResidencyTable(page_, *plan_).bucket(command.bucket).reduced.store(command.step, std::memory_order_release);
  } else if (command.kind == CommandKind::kMerge) {
    Pulled().Merged({command.first_slot, command.num_slots}, command.partial);
  } else {
    if (command.kind == CommandKind::kStep && command.apply) page_->parity.store(1 - command.parity);
    Reach(FaultPoint::kParityTurned);
    // In a repeated commit the step may count already: peers read its outcome.
    if (!GatherFollows() && committed_step().value() < command.step) CommitStep(command);
  }
  page_->committed.store(decided(), std::memory_order_release);
  Reach(FaultPoint::kCommitted);
  FutexBump(page_->finished);
}

uint64_t StepProtocol::AskForDigest() {
  const uint64_t ticket = page_->digest_wanted.fetch_add(1) + 1;
  FutexBump(*doorbell_);
  return ticket;
}

absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> StepProtocol::DigestOf(uint64_t ticket) const {
  const uint64_t writing = page_->digest_writing.load();
  const bool done = page_->digest_done.load() >= ticket && writing % 2 == 0;
  const Step step(page_->digest_step.load());
  const uint64_t value = page_->digest_value.load(), differs = page_->digest_differs.load();
  if (!done || page_->digest_writing.load() != writing) {  // not yet, or a newer one is just being written
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
  const uint64_t ticket = page_->publish_wanted.fetch_add(1) + 1;
  FutexBump(*doorbell_);
  return ticket;
}

void StepProtocol::AnswerPublish(uint64_t ticket, int64_t step) {
  page_->publish_step.store(step);
  page_->publish_done.store(ticket);
  FutexBump(page_->finished);
}

// The version may be there already, or no publication free.
bool StepProtocol::DecidePublish(Command& command) {
  const uint64_t ticket = page_->publish_wanted.load();
  if (page_->publish_done.load() >= ticket) return false;
  if (publications_.Find(Step(command.step)).has_value()) {
    AnswerPublish(ticket, command.step);
    return false;
  }
  command.kind = CommandKind::kPublish;
  command.publish = publications_.ReserveAny();
  command.nonfinite = static_cast<int64_t>(ticket);
  if (command.publish < 0) AnswerPublish(ticket, -1);
  return command.publish >= 0;
}

absl::StatusOr<std::optional<Step>> StepProtocol::PublishedFor(uint64_t ticket) const {
  if (page_->publish_done.load() < ticket) return std::optional<Step>();
  const Step step(page_->publish_step.load());
  if (step.value() >= 0) return std::make_optional(step);
  return absl::ResourceExhaustedError(absl::StrCat(
      "job ", job_->name, " has ", job_->publications, " publications, and all are held: ", publications_.Holders(),
      "; readers must release a version first (shardctl leases ", job_->name, "), or the job needs more publications"));
}

}  // namespace shardmesh
