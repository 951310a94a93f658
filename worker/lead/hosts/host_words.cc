#include "worker/lead/hosts/host_words.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "worker/control/residency.h"

namespace shardmesh {

static_assert(std::is_trivially_copyable_v<HostFacts>);

int64_t HostWordsBytes(const JobSpec& job) {
  return static_cast<int64_t>(sizeof(HostFacts) + sizeof(double) * job.num_groups());
}

void PackHostWords(const HostWords& words, char* bytes) {
  const HostFacts& facts = words;
  std::memcpy(bytes, &facts, sizeof(facts));
  std::memcpy(bytes + sizeof(facts), words.learning_rates.data(), sizeof(double) * words.learning_rates.size());
}

void UnpackHostWords(const char* bytes, const JobSpec& job, HostWords& words) {
  HostFacts facts;
  std::memcpy(&facts, bytes, sizeof(facts));
  static_cast<HostFacts&>(words) = facts;
  words.learning_rates.resize(job.num_groups());
  std::memcpy(words.learning_rates.data(), bytes + sizeof(facts), sizeof(double) * job.num_groups());
}

namespace {

// The bits of one bucket, as HostBuckets; the open step's.
void ReadBucket(const ResidencyTable& table, const JobSpec& job, const Plan& plan, int bucket, int64_t open,
                std::vector<HostBucket>& to, int& of_slots) {
  const BucketWords& words = table.bucket(bucket);
  const bool held = words.held.load() != kBucketAbsent;
  const uint64_t window = (table.IsUsed(bucket) ? HostBucket::kUsed : 0) | (held ? HostBucket::kHeld : 0);
  if (window != 0) to.push_back({bucket, HostBucket::kWindow, window});
  if (plan.pulled() || plan.buckets()[bucket].frozen) return;
  if (words.reduced.load(std::memory_order_acquire) >= open) return;
  for (int s = 0; s < job.num_slots; ++s) {
    HostBucket slot{bucket, s, 0};
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (table.gradient_shard(bucket, s, p).load(std::memory_order_acquire) == open) slot.bits |= uint64_t{1} << p;
    }
    if (slot.bits != 0 && of_slots++ < kMaxHostBuckets) to.push_back(slot);
  }
}

void ReadBuckets(ControlBlock& control, const JobSpec& job, const Plan& plan, HostWords& words) {
  const ResidencyTable table(&control, plan);
  int of_slots = 0;
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    ReadBucket(table, job, plan, b, words.committed + 1, words.buckets, of_slots);
  }
  for (int s = 0; s < job.num_slots; ++s) words.slots[s].waiting = table.Waits(s) ? 1 : 0;
  words.num_buckets = static_cast<int32_t>(words.buckets.size());
}

}  // namespace

HostWords ReadHostWords(const StepProtocol& protocol, const JobSpec& job, const Plan& plan) {
  const ControlBlock& control = *protocol.control();
  Facts here;
  ReadBeginning(control, protocol.local(), here);
  ReadTickets(control, here);
  HostWords words;
  words.abort = control.abort.load(std::memory_order_acquire);
  words.committed = protocol.committed_step().value();
  words.initial_id = here.initial_id;
  words.loaded_id = here.loaded_id;
  words.loaded_step = here.loaded_id != 0 ? here.loaded_step : 0;
  words.digest_wanted = here.digest_wanted ? 1 : 0;
  words.publish_wanted = here.publish_wanted ? 1 : 0;
  words.looks_again = control.looks_again.load() != 0 ? 1 : 0;
  words.comes_back = protocol.members().ComesBack(protocol.local().first()) ? 1 : 0;
  words.open = protocol.committed() != protocol.decided() ? 1 : 0;
  words.ends = control.ends.load() != 0 ? 1 : 0;
  words.restored = here.all_restored ? 1 : 0;
  words.restored_step_plus_one = control.restored_step_plus_one.load(std::memory_order_acquire);
  const int64_t open = words.committed + 1;
  for (int s = 0; s < job.num_writers(); ++s) {
    const SlotWords& from = control.slots[s];
    HostSlot& slot = words.slots[s];
    // In this order: whoever was seen to be gone or done is seen with all that it did.
    slot.holder = from.holder.load();
    slot.busy = IsBeingDeclared(from) ? 1 : 0;
    for (int p = 0; p < plan.num_shards(); ++p) slot.busy |= control.pushes[s][p].load() != 0 ? 2 : 0;
    if (plan.pulled()) continue;  // a seat
    slot.declared = from.declared.load(std::memory_order_acquire);
    slot.tokens = from.tokens.load();
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (control.gradient_shards[s][p].load(std::memory_order_acquire) == open)
        slot.gradient_shards |= uint64_t{1} << p;
    }
    slot.nonfinite = from.nonfinite.load(std::memory_order_acquire);  // noted before gradient shards and declarations
  }
  // Claimed before a slot is declared.
  const uint64_t claim = control.settings_claim.load(std::memory_order_acquire);
  const bool own = (claim & 0xffff) != kRatesElsewhere;
  words.rates_step = own ? static_cast<int64_t>(claim >> 16) : 0;
  words.learning_rates.resize(job.num_groups());
  const int first = own ? static_cast<int>(claim & 0xffff) : 0;
  const GroupTable::Rate* const said = GroupTable(protocol.control(), plan).said(first);
  for (int g = 0; g < job.num_groups() && own; ++g) words.learning_rates[g] = said[g].load(std::memory_order_acquire);
  if (own) words.loss_scale = control.slots[claim & 0xffff].loss_scale.load(std::memory_order_acquire);
  for (int r = protocol.local().first(); r < protocol.local().end(); ++r) {
    words.digests[r - protocol.local().first()] = control.members[r].digest.load(std::memory_order_acquire);
  }
  if (plan.bucketed()) ReadBuckets(*protocol.control(), job, plan, words);
  return words;
}

namespace {

template <typename... What>
absl::Status Cannot(const What&... what) {
  return absl::InvalidArgumentError(absl::StrCat(what...));
}

}  // namespace

absl::Status CheckWords(const HostWords& words, const JobSpec& job, const Plan& plan) {
  if (words.committed < kNoStep || words.committed > kMaxStep) return Cannot("committed step ", words.committed);
  if (words.restored_step_plus_one < 0 || words.restored_step_plus_one > kMaxStep + 1) {
    return Cannot("shards of step ", words.restored_step_plus_one - 1);
  }
  const int most = plan.bucketed() ? kMaxHostBuckets + static_cast<int>(plan.buckets().size()) : 0;
  if (words.num_buckets < 0 || words.num_buckets > most) {
    return Cannot(words.num_buckets, " words of buckets, at most ", most);
  }
  if (words.publish < -1 || words.publish >= job.publications) {
    return Cannot("publication ", words.publish, " of ", job.publications);
  }
  for (int s = 0; s < job.num_writers(); ++s) {
    const HostSlot& slot = words.slots[s];
    if (slot.tokens < 0 || slot.tokens > kMaxTokens) return Cannot("slot ", s, " has ", slot.tokens, " tokens");
    if (slot.declared < 0 || slot.declared > words.committed + 1) {
      return Cannot("slot ", s, " is declared for step ", slot.declared, " after step ", words.committed);
    }
    const int tensor = NonFiniteTensorOf(slot.nonfinite);
    if (tensor < -1 || tensor >= static_cast<int>(job.parameters.size())) {
      return Cannot("slot ", s, " has a gradient of tensor ", tensor, " that is not finite");
    }
  }
  for (int seat = 0; seat < job.num_trainers; ++seat) {
    const HostSeat& says = words.seats[seat];
    if (says.finishes == 0) continue;
    if (says.slot < 0 || says.slot >= job.num_slots) return Cannot("seat ", seat, " has finished slot ", says.slot);
    if (says.step < 1 || says.step > words.committed + 1) {
      return Cannot("seat ", seat, " has finished a slot of step ", says.step, " after step ", words.committed);
    }
    if (says.tokens < 0 || says.tokens > kMaxTokens) return Cannot("seat ", seat, " has ", says.tokens, " tokens");
    if (says.non_finite < -1 || says.non_finite >= static_cast<int64_t>(job.parameters.size())) {
      return Cannot("seat ", seat, " has a gradient of tensor ", says.non_finite, " that is not finite");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBuckets(const HostWords& words, const JobSpec& job, const Plan& plan) {
  const auto buckets = static_cast<int>(plan.buckets().size());
  for (size_t i = 0; i < words.buckets.size(); ++i) {
    const HostBucket& bucket = words.buckets[i];
    if (bucket.bucket < 0 || bucket.bucket >= buckets) return Cannot("bucket ", bucket.bucket, " of ", buckets);
    if (bucket.slot < HostBucket::kWindow || bucket.slot >= (job.pulled() ? 0 : job.num_slots)) {
      return Cannot("slot ", bucket.slot, " of bucket ", bucket.bucket);
    }
    const auto place = [](const HostBucket& of) { return std::make_pair(of.bucket, of.slot); };
    if (i > 0 && place(words.buckets[i - 1]) >= place(bucket)) {
      return Cannot("bucket ", bucket.bucket, " twice, or out of order");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTogether(AllHostWords words, const JobSpec& job, int& host) {
  for (size_t h = 1; h < words.size(); ++h) {
    if (words[h]->committed == words[0]->committed) continue;
    host = static_cast<int>(h);
    return absl::InvalidArgumentError(absl::StrCat("committed step ", words[h]->committed, ", where host 0 has ",
                                                   words[0]->committed, " (host ", h, ")"));
  }
  for (int s = 0; s < job.num_writers(); ++s) {
    const int writer = HostOfWriter(words, s);
    for (int h = writer + 1; writer >= 0 && h < static_cast<int>(words.size()); ++h) {
      const uint64_t holder = words[h]->slots[s].holder;
      if (holder == 0 || (holder & kAsking) != 0) continue;
      host = h;
      return absl::InvalidArgumentError(
          absl::StrCat(job.pulled() ? "seat " : "slot ", s, " has attached trainers on host ", writer, " and on host ", h));
    }
  }
  return absl::OkStatus();
}

int HostOfWriter(AllHostWords words, int slot) {
  for (size_t h = 0; h < words.size(); ++h) {
    const uint64_t holder = words[h]->slots[slot].holder;
    if (holder != 0 && (holder & kAsking) == 0) return static_cast<int>(h);
  }
  return -1;
}

int HostGiven(AllHostWords before, AllHostWords words, int slot) {
  if (HostOfWriter(words, slot) >= 0) return -1;
  const int64_t open = words[0]->committed + 1;
  int first = -1;
  for (int h = static_cast<int>(words.size()) - 1; h >= 0; --h) {
    const HostSlot& now = words[h]->slots[slot];
    if (now.busy != 0 || (open > 0 && now.declared == open)) return -1;
    if (now.holder != 0 && now.holder == before[h]->slots[slot].holder) first = h;
  }
  return first;
}

bool SaidTheSame(const HostWords& one, const HostWords& other) {
  return one.loss_scale == other.loss_scale && one.learning_rates == other.learning_rates;
}

int HostOfRates(AllHostWords words) {
  for (size_t h = 0; h < words.size(); ++h) {
    if (words[h]->rates_step == words[h]->committed + 1) return static_cast<int>(h);
  }
  return -1;
}

namespace {

// The first host of those whose words of the slot count of which `is` holds.
template <class Is>
int FirstHost(AllHostWords words, int slot, const Is& is) {
  const int writer = HostOfWriter(words, slot);
  for (int h = 0; h < static_cast<int>(words.size()); ++h) {
    if ((writer < 0 || writer == h) && is(words[h]->slots[slot])) return h;
  }
  return -1;
}

}  // namespace

namespace {

// What a host says of a bucket; 0: nothing.
uint64_t BitsOf(const HostWords& words, int bucket, int slot) {
  const auto at = std::lower_bound(words.buckets.begin(), words.buckets.end(), std::make_pair(bucket, slot),
                                   [](const HostBucket& of, const std::pair<int, int>& place) {
                                     return std::make_pair(int{of.bucket}, int{of.slot}) < place;
                                   });
  return at != words.buckets.end() && at->bucket == bucket && at->slot == slot ? at->bits : 0;
}

}  // namespace

int HostOfShard(AllHostWords words, int slot, int shard, int bucket) {
  if (bucket < 0) {
    return FirstHost(words, slot, [&](const HostSlot& words) { return (words.gradient_shards >> shard & 1) != 0; });
  }
  const int writer = HostOfWriter(words, slot);
  for (int h = 0; h < static_cast<int>(words.size()); ++h) {
    if ((writer < 0 || writer == h) && (BitsOf(*words[h], bucket, slot) >> shard & 1) != 0) return h;
  }
  return -1;
}

HostSet HostsWith(AllHostWords words, int bucket, uint64_t bits) {
  HostSet hosts = 0;
  for (size_t h = 0; h < words.size(); ++h) {
    if ((BitsOf(*words[h], bucket, HostBucket::kWindow) & bits) != 0) hosts |= HostSet{1} << h;
  }
  return hosts;
}

namespace {

int HostOfDeclaration(AllHostWords words, int slot, int64_t step) {
  return FirstHost(words, slot, [&](const HostSlot& words) { return words.declared == step; });
}

bool SlotComplete(AllHostWords words, const Plan& plan, int slot, int64_t step) {
  const bool declared = HostOfDeclaration(words, slot, step) >= 0;
  for (int p = 0; p < plan.num_shards() && !plan.bucketed(); ++p) {
    if (!declared || HostOfShard(words, slot, p) < 0) return false;
  }
  return declared;
}

}  // namespace

SlotSet SettledSlots(AllHostWords words, const JobSpec& job, const Plan& plan) {
  SlotSet settled;
  const int64_t open = words[0]->committed + 1;
  const int first = HostOfRates(words);
  if (open < 1 || first < 0 || plan.bucketed() || plan.pulled()) return settled;
  for (int s = 0; s < job.num_slots; ++s) {
    settled[s] = SlotComplete(words, plan, s, open);
    for (const HostWords* host : words) {  // what was declared on another host with other rates is taken back
      const bool refused = host->rates_step == open && !SaidTheSame(*host, *words[first]);
      if (refused && host->slots[s].declared == open) settled[s] = false;
    }
  }
  return settled;
}

namespace {

void MergeBeginning(AllHostWords words, Facts& facts) {
  facts.initial_id = words[0]->initial_id;
  facts.loaded_id = words[0]->loaded_id;
  facts.loaded_step = words[0]->loaded_step;
  for (const HostWords* host : words) {
    if (host->initial_id != facts.initial_id) facts.initial_id = 0;
    if (host->loaded_id != facts.loaded_id || host->loaded_step != facts.loaded_step) facts.loaded_id = 0;
  }
  // The lead of one host may say the step before another does.
  facts.all_restored = true;
  for (const HostWords* host : words) facts.restored = std::max(facts.restored, host->restored_step_plus_one - 1);
  for (const HostWords* host : words) {
    const bool filled = host->restored != 0 && host->restored_step_plus_one - 1 == facts.restored;
    facts.all_restored = facts.all_restored && filled;
  }
}

// Whether every gradient shard of a bucket lies on some host.
bool BucketComplete(AllHostWords words, const JobSpec& job, const Plan& plan, int bucket) {
  for (int s = 0; s < job.num_slots; ++s) {
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (HostOfShard(words, s, p, bucket) < 0) return false;
    }
  }
  return true;
}

void MergeBucketUses(AllHostWords words, const Plan& plan, Facts& facts) {
  for (int b = 0; b < static_cast<int>(plan.buckets().size()) && facts.bucket_to_gather < 0; ++b) {
    const HostSet lacking = HostsWith(words, b, HostBucket::kUsed) & ~HostsWith(words, b, HostBucket::kHeld);
    if (lacking != 0) facts.bucket_to_gather = b;
  }
}

void MergeBuckets(AllHostWords words, const JobSpec& job, const Plan& plan, const ResidencyTable& table, Facts& facts) {
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    if (plan.buckets()[b].frozen || table.bucket(b).reduced.load(std::memory_order_acquire) > facts.committed) continue;
    facts.slots_complete = false;
    if (facts.bucket_to_sum < 0 && BucketComplete(words, job, plan, b)) facts.bucket_to_sum = b;
  }
}

void MergeDeclared(AllHostWords words, const JobSpec& job, Facts& facts) {
  const int64_t open = facts.committed + 1;
  for (int s = 0; s < job.num_slots; ++s) {
    const int writer = HostOfWriter(words, s);
    int64_t bad = 0;
    for (int h = 0; h < static_cast<int>(words.size()); ++h) {
      if (writer < 0 || writer == h) bad = std::max(bad, words[h]->slots[s].nonfinite);
    }
    if (!facts.bad.has_value() && NonFiniteStepOf(bad) == open) facts.bad = BadGradient{s, NonFiniteTensorOf(bad)};
    if (job.token_weights) facts.tokens += words[HostOfDeclaration(words, s, open)]->slots[s].tokens;
  }
  if (const int h = HostOfRates(words); h >= 0) {
    facts.learning_rates.assign(words[h]->learning_rates.begin(), words[h]->learning_rates.end());
    facts.loss_scale = words[h]->loss_scale;
  }
}

}  // namespace

Facts MergeFacts(AllHostWords words, const Committed& committed, const JobSpec& job, const Plan& plan,
                 ControlBlock& control) {
  Facts facts;
  static_cast<Committed&>(facts) = committed;
  for (const HostWords* host : words) {
    facts.digest_wanted = facts.digest_wanted || host->digest_wanted != 0;
    facts.publish_wanted = facts.publish_wanted || host->publish_wanted != 0;
  }
  if (facts.committed == kNoStep) {
    MergeBeginning(words, facts);
    return facts;
  }
  if (plan.bucketed()) MergeBucketUses(words, plan, facts);
  if (plan.pulled()) {
    ReadOpenStep(control, job, plan, facts);
    return facts;
  }
  facts.slots_complete = true;
  for (int s = 0; s < job.num_slots; ++s) {
    facts.slots_complete = facts.slots_complete && SlotComplete(words, plan, s, facts.committed + 1);
  }
  if (plan.bucketed()) MergeBuckets(words, job, plan, ResidencyTable(&control, plan), facts);
  if (facts.slots_complete) MergeDeclared(words, job, facts);
  return facts;
}

}  // namespace shardmesh
