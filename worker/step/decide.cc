#include "worker/step/decide.h"

#include "worker/step/gradient_norm.h"

namespace shardmesh {
namespace {

// The weights that the job begins with at this epoch: those that it had before, those of a checkpoint, or initial ones.
bool DecideFirst(const Facts& facts, Command& command) {
  if (facts.restored != kNoStep) {
    if (!facts.all_restored) return false;
    command.kind = CommandKind::kRestore;
    command.step = facts.restored;
  } else if (facts.loaded_id != 0) {
    command.kind = CommandKind::kRestore;
    command.initial_id = facts.loaded_id;
    command.step = facts.loaded_step;
  } else if (facts.initial_id != 0) {
    command.kind = CommandKind::kInit;
    command.initial_id = facts.initial_id;
  } else {
    return false;
  }
  command.first = 1;
  return true;
}

// A sum of some gradients, or the gathering of a bucket that a trainer waits for.
bool DecidePart(const Facts& facts, Command& command) {
  if (facts.bucket_to_gather >= 0) {
    command.kind = CommandKind::kGatherBucket;
    command.step = facts.committed;
    command.bucket = facts.bucket_to_gather;
  } else if (facts.bucket_to_sum >= 0) {
    command.kind = CommandKind::kReduceBucket;
    command.bucket = facts.bucket_to_sum;
  } else if (facts.slots_to_merge > 0 && facts.free_partial >= 0) {
    command.kind = CommandKind::kMerge;
    command.partial = facts.free_partial;
    command.first_slot = facts.first_to_merge;
    command.num_slots = facts.slots_to_merge;
  } else {
    return false;
  }
  return true;
}

// A step of which all slots are complete; or, before it, the norm of its gradients.
void DecideStep(const Facts& facts, const JobSpec& job, Command& command) {
  const double divisor = job.token_weights ? static_cast<double>(facts.tokens) : job.num_slots;
  command.kind = CommandKind::kStep;
  command.apply = 1;
  if (facts.bad.has_value()) {
    command.apply = 0;
    command.nonfinite = int64_t{facts.bad->slot} << 32 | facts.bad->tensor;
  } else if (divisor == 0) {
    command.apply = 0;
    command.nonfinite = kNoTokens;
  }
  command.divide_scale = divisor == 0 ? 0 : static_cast<float>(1 / (divisor * facts.loss_scale));
  command.partial = facts.root;
  if (command.apply != 0 && job.clip_norm > 0) {
    if (facts.norm_step != command.step) {
      command.kind = CommandKind::kNorm;
      return;
    }
    command.clip = ClipFactor(job.clip_norm, facts.norm);
  }
  command.groups = static_cast<int32_t>((facts.decided + 1) % 2);  // where the newest command's are not
}

}  // namespace

std::optional<Command> Decide(const Facts& facts, const JobSpec& job, const Plan& plan) {
  Command command;
  command.step = facts.committed + 1;
  command.parity = facts.parity;
  const bool compare = CompareFollows(facts, job, plan);
  if (QuantizeFollows(facts, plan)) {  // first of all: what was decided is rolled forward
    command = facts.last;
    command.kind = CommandKind::kQuantize;
    command.parity = facts.parity;
  } else if (facts.committed == kNoStep) {
    if (!DecideFirst(facts, command)) return std::nullopt;
  } else if (!compare && DecidePart(facts, command)) {
    return command;
  } else if (!compare && facts.slots_complete) {
    DecideStep(facts, job, command);
  } else if (compare || facts.digest_wanted) {
    command.kind = CommandKind::kDigest;
    command.step = facts.committed;
    command.nonfinite = static_cast<int64_t>(facts.digest_ticket);
  } else if (facts.publish_wanted) {
    command.kind = CommandKind::kPublish;
    command.step = facts.committed;
    command.nonfinite = static_cast<int64_t>(facts.publish_ticket);
  } else {
    return std::nullopt;
  }
  return command;
}

Publishes PublishesOf(const Command& command) {
  switch (command.kind) {
    case CommandKind::kInit:
    case CommandKind::kRestore:
      return Publishes::kItsVersion;
    case CommandKind::kStep:
      return command.apply != 0 ? Publishes::kItsVersion : Publishes::kNothing;
    case CommandKind::kPublish:
      return Publishes::kForSure;
    default:
      return Publishes::kNothing;
  }
}

}  // namespace shardmesh
