// Of StepProtocol: what the lead decides and commits, and what comes of it: publications and digests.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "local/futex.h"
#include "worker/gradient_norm.h"
#include "worker/step_protocol.h"

namespace shardmesh {

// The id of the set of which every member has its piece; 0: there is none yet.
uint64_t StepProtocol::CompleteInitialId() const {
  const uint64_t id = page_->members[0].initial_id.load(std::memory_order_acquire);
  for (int r = 1; r < num_ranks(); ++r) {
    if (page_->members[r].initial_id.load(std::memory_order_acquire) != id) return 0;
  }
  return id;
}

bool StepProtocol::SlotsComplete(int64_t step) const {
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
int StepProtocol::ChoosePublication(int64_t step) {
  if (step % job_->publish_every != 0) return -1;
  PublicationWords* publications = page_->publications;
  const int target = publications[0].version_plus_one.load() <= publications[1].version_plus_one.load() ? 0 : 1;
  if (publications[target].pins.load() != 0) return -1;
  const int64_t before = publications[target].version_plus_one.exchange(0);
  if (publications[target].pins.load() == 0) return target;
  publications[target].version_plus_one.store(before);
  return -1;
}

// Whether the newest command wrote weights of which some are still to be gathered in codes; the page alone says so.
bool StepProtocol::GatherFollows() const {
  const Command& last = page_->command;
  if (last.kind == CommandKind::kInit) return plan_->coded();
  return last.kind == CommandKind::kStep && last.apply != 0 && plan_->steps_coded();
}

void StepProtocol::Issue(const Command& command) {
  page_->command = command;
  if (command.kind == CommandKind::kInit || (command.kind == CommandKind::kStep && command.apply != 0)) {
    std::atomic<uint32_t>* const maxima = Maxima(page_, *plan_);
    for (int64_t i = 0; i < plan_->num_maxima(); ++i) maxima[i].store(0, std::memory_order_relaxed);
  }
  page_->decided.fetch_add(1, std::memory_order_release);
  FutexBump(page_->decision);
}

// Fills in a step of which all slots are complete; or, before it, the norm of its gradients.
bool StepProtocol::DecideStep(Command& command) {
  command.kind = CommandKind::kStep;
  command.apply = 1;
  for (int s = 0; s < job_->num_slots && command.apply; ++s) {
    const int64_t word = page_->slots[s].nonfinite.load(std::memory_order_acquire);
    if (NonFiniteStepOf(word) != command.step) continue;
    command.apply = 0;
    command.nonfinite = int64_t{s} << 32 | NonFiniteTensorOf(word);
  }
  if (command.apply && job_->clip_norm > 0) {
    if (page_->norm_step.load(std::memory_order_acquire) != command.step) {
      command.kind = CommandKind::kNorm;
      return true;
    }
    command.clip = ClipFactor(job_->clip_norm, page_->norm.load(std::memory_order_acquire));
  }
  const SlotWords& first = page_->slots[page_->lr_claim.load(std::memory_order_acquire) & 0xffff];
  for (int g = 0; g < job_->num_groups(); ++g) {
    OptimizerHyper hyper = job_->group(g);
    hyper.lr = first.learning_rates[g].load(std::memory_order_acquire);
    auto scalars = ComputeStepScalars(hyper, command.step);  // validated when it was claimed
    if (!scalars.ok()) return false;
    command.scalars[g] = *scalars;
  }
  if (command.apply) command.publish = ChoosePublication(command.step);
  return true;
}

bool StepProtocol::Decide() {
  if (page_->abort.load() != 0) return false;
  Command command;
  const int64_t committed = committed_step().value();
  command.step = committed + 1;
  command.parity = page_->parity.load(std::memory_order_acquire);
  if (GatherFollows()) {  // first of all: what was decided is rolled forward
    command = page_->command;
    command.kind = CommandKind::kGather;
    command.parity = page_->parity.load(std::memory_order_acquire);
  } else if (committed == kNoStep) {
    command.initial_id = CompleteInitialId();
    if (command.initial_id == 0) return false;
    command.kind = CommandKind::kInit;
    command.publish = ChoosePublication(0);
  } else if (SlotsComplete(command.step)) {
    if (!DecideStep(command)) return false;
  } else if (page_->digest_wanted.load() > page_->digest_done.load()) {
    command.kind = CommandKind::kDigest;
    command.step = committed;
    command.nonfinite = static_cast<int64_t>(page_->digest_wanted.load());
  } else {
    return false;
  }
  Issue(command);
  return true;
}

void StepProtocol::Done(Rank rank, uint64_t seq) {
  page_->members[rank.value()].done.store(seq, std::memory_order_release);
  FutexBump(page_->doorbell);
}

bool StepProtocol::AllDone() const {
  const uint64_t seq = decided();
  for (int r = 0; r < num_ranks(); ++r) {
    if (page_->members[r].done.load(std::memory_order_acquire) != seq) return false;
  }
  return true;
}

std::vector<int> StepProtocol::NotDone() const {
  std::vector<int> ranks;
  for (int r = 0; r < num_ranks(); ++r) {
    if (page_->members[r].done.load(std::memory_order_acquire) != decided()) ranks.push_back(r);
  }
  return ranks;
}

// Adds one replica of every shard up, and compares the others with it.
void StepProtocol::SummarizeDigest() {
  uint64_t sum = 0, differs = 0;
  for (int shard = 0; shard < plan_->num_shards(); ++shard) {
    const int first = plan_->RankOf({shard, 0}).value();
    sum += page_->members[first].digest.load(std::memory_order_acquire);
    for (int replica = 1; replica < plan_->num_replicas(); ++replica) {
      const int other = plan_->RankOf({shard, replica}).value();
      if (page_->members[other].digest.load() == page_->members[first].digest.load()) continue;
      differs = static_cast<uint64_t>(first + 1) << 32 | static_cast<uint64_t>(other + 1);
    }
  }
  page_->digest_value.store(sum);
  page_->digest_step.store(page_->command.step);
  page_->digest_differs.store(differs);
  page_->digest_done.store(static_cast<uint64_t>(page_->command.nonfinite));
}

void StepProtocol::CommitStep(const Command& command) {
  OutcomeWords& outcome = page_->outcomes[command.step % kOutcomeRing];
  const bool skipped = command.kind == CommandKind::kStep && !command.apply;
  outcome.step.store(kNoStep, std::memory_order_release);
  outcome.skipped.store(skipped ? command.nonfinite + 1 : 0, std::memory_order_release);
  const bool normed = page_->norm_step.load(std::memory_order_acquire) == command.step;
  outcome.norm.store(normed ? page_->norm.load(std::memory_order_acquire) : 0, std::memory_order_release);
  outcome.step.store(command.step, std::memory_order_release);
  if (command.publish >= 0) page_->publications[command.publish].version_plus_one.store(command.step + 1);
  page_->committed_step_plus_one.store(command.step + 1, std::memory_order_release);
}

void StepProtocol::Commit() {
  const Command& command = page_->command;
  if (command.kind == CommandKind::kDigest) {
    SummarizeDigest();
  } else if (command.kind == CommandKind::kNorm) {
    page_->norm.store(GradientNorm(*job_, *plan_, SquareSums(page_)), std::memory_order_release);
    page_->norm_step.store(command.step, std::memory_order_release);
  } else {
    if (command.kind == CommandKind::kStep && command.apply) page_->parity.store(1 - command.parity);
    if (!GatherFollows()) CommitStep(command);
  }
  page_->committed.store(decided(), std::memory_order_release);
  FutexBump(page_->finished);
}

uint64_t StepProtocol::AskForDigest() {
  const uint64_t ticket = page_->digest_wanted.fetch_add(1) + 1;
  FutexBump(page_->doorbell);
  return ticket;
}

absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> StepProtocol::DigestOf(uint64_t ticket) const {
  uint64_t done = page_->digest_done.load();
  if (done < ticket) {
    RETURN_IF_ERROR(Health());
    return std::optional<std::pair<Step, uint64_t>>();
  }
  while (true) {  // a newer digest may be stored meanwhile: read until two reads of its ticket agree
    const Step step(page_->digest_step.load());
    const uint64_t value = page_->digest_value.load(), differs = page_->digest_differs.load();
    if (const uint64_t again = page_->digest_done.load(); again != done) {
      done = again;
      continue;
    }
    if (differs == 0) return std::make_optional(std::make_pair(step, value));
    const int a = static_cast<int>(differs >> 32) - 1, b = static_cast<int>(differs & 0xffffffff) - 1;
    return absl::DataLossError(absl::StrCat("replicas differ at step ", step.value(), ": worker ", names_[a], " (rank ",
                                            a, ") and worker ", names_[b], " (rank ", b,
                                            ") hold the same shard with other bits; check their memory"));
  }
}

std::vector<Step> StepProtocol::Published() const {
  std::vector<Step> steps;
  for (const PublicationWords& words : page_->publications) {
    if (const int64_t version = words.version_plus_one.load(); version > 0) steps.push_back(Step(version - 1));
  }
  if (steps.size() == 2 && steps[1] < steps[0]) std::swap(steps[0], steps[1]);
  return steps;
}

std::optional<int> StepProtocol::Pin(Step step) {
  for (int buffer = 0; buffer < kPublicationBuffers; ++buffer) {
    PublicationWords& words = page_->publications[buffer];
    if (words.version_plus_one.load() != step.value() + 1) continue;
    words.pins.fetch_add(1);
    if (words.version_plus_one.load() == step.value() + 1) return buffer;
    words.pins.fetch_sub(1);
  }
  return std::nullopt;
}

void StepProtocol::Unpin(int buffer) { page_->publications[buffer].pins.fetch_sub(1); }

}  // namespace shardmesh
