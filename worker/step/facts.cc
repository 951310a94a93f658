#include "worker/step/facts.h"

#include "worker/control/group_table.h"
#include "worker/control/residency.h"
#include "worker/step/pulled_slots.h"

namespace shardmesh {
namespace {

// The id that every member of the host says of itself; 0: they do not agree, or say none.
uint64_t CommonId(const ControlBlock& control, const HostRanks& ranks, std::atomic<uint64_t> MemberWords::*word) {
  const uint64_t id = (control.members[ranks.first()].*word).load(std::memory_order_acquire);
  for (int r = ranks.first(); r < ranks.end(); ++r) {
    if ((control.members[r].*word).load(std::memory_order_acquire) != id) return 0;
  }
  return id;
}

bool AllDeclared(const ControlBlock& control, const JobSpec& job, int64_t step) {
  for (int s = 0; s < job.num_slots; ++s) {
    if (control.slots[s].declared.load(std::memory_order_acquire) != step) return false;
  }
  return true;
}

bool AllShards(const ControlBlock& control, const JobSpec& job, const Plan& plan, int64_t step) {
  for (int s = 0; s < job.num_slots; ++s) {
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (control.gradient_shards[s][p].load(std::memory_order_acquire) != step) return false;
    }
  }
  return true;
}

bool EverySlotHas(const ResidencyTable& table, const JobSpec& job, const Plan& plan, int bucket, int64_t step) {
  for (int s = 0; s < job.num_slots; ++s) {
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (table.gradient_shard(bucket, s, p).load(std::memory_order_acquire) < step) return false;
    }
  }
  return true;
}

// Whether the whole step is declared, and summed bucket by bucket.
void ReadBuckets(ControlBlock& control, const JobSpec& job, const Plan& plan, Facts& facts) {
  const ResidencyTable table(&control, plan);
  const int64_t open = facts.committed + 1;
  bool all_summed = true;
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    const int64_t reduced = table.bucket(b).reduced.load(std::memory_order_acquire);
    if (plan.buckets()[b].frozen || reduced >= open) continue;
    all_summed = false;
    if (facts.bucket_to_sum < 0 && EverySlotHas(table, job, plan, b, open)) facts.bucket_to_sum = b;
  }
  facts.slots_complete = all_summed && AllDeclared(control, job, open);
}

void ReadPulled(ControlBlock& control, const JobSpec& job, const Plan& plan, Facts& facts) {
  const PulledSlots table(&control, job, plan, facts.committed + 1);
  if (const std::optional<SlotRange> next = table.NextMerge(); next.has_value()) {
    facts.first_to_merge = next->first;
    facts.slots_to_merge = next->count;
    facts.free_partial = table.FreePartial();
  }
  facts.root = table.Root();
  facts.slots_complete = facts.root >= 0;
}

// What slots said with their declarations. After these were read.
void ReadDeclared(ControlBlock& control, const JobSpec& job, const Plan& plan, Facts& facts) {
  for (int s = 0; s < job.num_slots; ++s) {
    const int64_t word = control.slots[s].nonfinite.load(std::memory_order_acquire);
    if (!facts.bad.has_value() && NonFiniteStepOf(word) == facts.committed + 1) {
      facts.bad = BadGradient{s, NonFiniteTensorOf(word)};
    }
    if (job.token_weights) facts.tokens += control.slots[s].tokens.load();
  }
  const GroupTable groups(&control, plan);
  const int slot = static_cast<int>(control.settings_claim.load(std::memory_order_acquire) & 0xffff);
  const bool elsewhere = slot == kRatesElsewhere;
  const GroupTable::Rate* const rates = elsewhere ? groups.said_elsewhere() : groups.said(slot);
  for (int g = 0; g < job.num_groups(); ++g) facts.learning_rates.push_back(rates[g].load(std::memory_order_acquire));
  const std::atomic<double>& scale = elsewhere ? control.elsewhere_loss_scale : control.slots[slot].loss_scale;
  facts.loss_scale = scale.load(std::memory_order_acquire);
}

}  // namespace

Committed ReadCommitted(const ControlBlock& control) {
  Committed facts;
  facts.decided = control.decided.load(std::memory_order_acquire);
  facts.last = control.commands[facts.decided % 2];
  facts.committed = control.committed_step_plus_one.load(std::memory_order_acquire) - 1;
  facts.parity = control.parity.load(std::memory_order_acquire);
  facts.norm_step = control.norm_step.load(std::memory_order_acquire);
  facts.norm = control.norm.load(std::memory_order_acquire);
  facts.digest_step = control.digest_step.load();
  facts.restored = control.restored_step_plus_one.load(std::memory_order_acquire) - 1;
  return facts;
}

void ReadBeginning(const ControlBlock& control, const HostRanks& ranks, Facts& facts) {
  facts.all_restored = true;
  for (int r = ranks.first(); r < ranks.end(); ++r) {
    facts.all_restored = facts.all_restored && control.members[r].restored.load(std::memory_order_acquire) != 0;
  }
  facts.initial_id = CommonId(control, ranks, &MemberWords::initial_id);
  facts.loaded_id = CommonId(control, ranks, &MemberWords::loaded_id);
  facts.loaded_step = control.members[ranks.first()].loaded_step.load(std::memory_order_acquire);
}

void ReadTickets(const ControlBlock& control, Facts& facts) {
  facts.digest_ticket = control.digest_wanted.load();
  facts.digest_wanted = facts.digest_ticket > control.digest_done.load();
  facts.publish_ticket = control.publish_wanted.load();
  facts.publish_wanted = facts.publish_ticket > control.publish_done.load();
}

void ReadBucketUses(ControlBlock& control, const Plan& plan, Facts& facts) {
  if (!plan.bucketed()) return;
  const ResidencyTable table(&control, plan);
  for (int b = 0; b < static_cast<int>(plan.buckets().size()) && facts.bucket_to_gather < 0; ++b) {
    if (table.bucket(b).held.load() == kBucketAbsent && table.IsUsed(b)) facts.bucket_to_gather = b;
  }
}

void ReadOpenStep(ControlBlock& control, const JobSpec& job, const Plan& plan, Facts& facts) {
  const int64_t open = facts.committed + 1;
  if (plan.pulled()) {
    ReadPulled(control, job, plan, facts);
  } else if (plan.bucketed()) {
    ReadBuckets(control, job, plan, facts);
  } else {
    facts.slots_complete = AllDeclared(control, job, open) && AllShards(control, job, plan, open);
  }
  if (facts.slots_complete) ReadDeclared(control, job, plan, facts);
}

Facts ReadFacts(ControlBlock& control, const JobSpec& job, const Plan& plan, const HostRanks& ranks) {
  Facts facts;
  static_cast<Committed&>(facts) = ReadCommitted(control);
  ReadTickets(control, facts);
  if (facts.committed == kNoStep) {
    ReadBeginning(control, ranks, facts);
  } else {
    ReadBucketUses(control, plan, facts);
    ReadOpenStep(control, job, plan, facts);
  }
  return facts;
}

bool QuantizeFollows(const Committed& committed, const Plan& plan) {
  const Command& last = committed.last;
  if (last.kind == CommandKind::kInit || last.kind == CommandKind::kRestore) return plan.scales().quantized;
  return last.kind == CommandKind::kStep && last.apply != 0 && plan.scales().steps_quantized;
}

bool CompareFollows(const Committed& committed, const JobSpec& job, const Plan& plan) {
  return job.check_every > 0 && plan.num_replicas() > 1 && committed.committed > 0 &&
         committed.committed % job.check_every == 0 && committed.digest_step != committed.committed;
}

bool MoreFollows(const Committed& committed, const JobSpec& job, const Plan& plan) {
  return QuantizeFollows(committed, plan) || CompareFollows(committed, job, plan) ||
         (committed.committed != kNoStep && committed.norm_step == committed.committed + 1);
}

}  // namespace shardmesh
