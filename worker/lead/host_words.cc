#include "worker/lead/host_words.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

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

HostWords ReadHostWords(const StepProtocol& protocol, const JobSpec& job, const Plan& plan) {
  const ControlPage& page = *protocol.page();
  const Agreed here = protocol.SeenHere();
  HostWords words;
  words.abort = page.abort.load(std::memory_order_acquire);
  words.committed = protocol.committed_step().value();
  words.initial_id = here.initial_id;
  words.digest_wanted = here.digest_wanted ? 1 : 0;
  words.looks_again = page.looks_again.load() != 0 ? 1 : 0;
  const int64_t open = words.committed + 1;
  for (int s = 0; s < job.num_slots; ++s) {
    const SlotWords& from = page.slots[s];
    HostSlot& slot = words.slots[s];
    // In this order: whoever was seen to be gone or done is seen with all that it did.
    slot.holder = from.holder.load();
    slot.busy = IsBeingDeclared(from) ? 1 : 0;
    for (int p = 0; p < plan.num_shards(); ++p) slot.busy |= page.pushes[s][p].load() != 0 ? 2 : 0;
    slot.declared = from.declared.load(std::memory_order_acquire);
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (page.pieces[s][p].load(std::memory_order_acquire) == open) slot.pieces |= uint64_t{1} << p;
    }
    slot.nonfinite = from.nonfinite.load(std::memory_order_acquire);  // noted before pieces and declarations
  }
  // Claimed before a slot is declared.
  const uint64_t claim = page.settings_claim.load(std::memory_order_acquire);
  const bool own = (claim & 0xffff) != kRatesElsewhere;
  words.rates_step = own ? static_cast<int64_t>(claim >> 16) : 0;
  words.learning_rates.resize(job.num_groups());
  const int first = own ? static_cast<int>(claim & 0xffff) : 0;
  const GroupTable::Rate* const said = GroupTable(protocol.page(), plan).said(first);
  for (int g = 0; g < job.num_groups() && own; ++g) words.learning_rates[g] = said[g].load(std::memory_order_acquire);
  if (own) words.loss_scale = page.slots[claim & 0xffff].loss_scale.load(std::memory_order_acquire);
  for (int r = protocol.local().first(); r < protocol.local().end(); ++r) {
    words.digests[r - protocol.local().first()] = page.members[r].digest.load(std::memory_order_acquire);
  }
  return words;
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

int HostOfPiece(AllHostWords words, int slot, int shard) {
  return FirstHost(words, slot, [&](const HostSlot& words) { return (words.pieces >> shard & 1) != 0; });
}

namespace {

bool SlotComplete(AllHostWords words, const Plan& plan, int slot, int64_t step) {
  const bool declared = FirstHost(words, slot, [&](const HostSlot& words) { return words.declared == step; }) >= 0;
  for (int p = 0; p < plan.num_shards(); ++p) {
    if (!declared || HostOfPiece(words, slot, p) < 0) return false;
  }
  return true;
}

bool SaidTheSame(const HostWords& one, const HostWords& other) {
  return one.loss_scale == other.loss_scale && one.learning_rates == other.learning_rates;
}

}  // namespace

SlotSet SettledSlots(AllHostWords words, const JobSpec& job, const Plan& plan) {
  SlotSet settled;
  const int64_t open = words[0]->committed + 1;
  const int first = HostOfRates(words);
  if (open < 1 || first < 0) return settled;
  for (int s = 0; s < job.num_slots; ++s) {
    settled[s] = SlotComplete(words, plan, s, open);
    for (const HostWords* host : words) {  // what was declared on another host with other rates is taken back
      const bool refused = host->rates_step == open && !SaidTheSame(*host, *words[first]);
      if (refused && host->slots[s].declared == open) settled[s] = false;
    }
  }
  return settled;
}

Agreed AgreedBy(AllHostWords words, const JobSpec& job, const Plan& plan) {
  Agreed agreed;
  agreed.initial_id = words[0]->initial_id;
  for (const HostWords* host : words) {
    if (host->initial_id != agreed.initial_id) agreed.initial_id = 0;
    agreed.digest_wanted = agreed.digest_wanted || host->digest_wanted != 0;
  }
  const int64_t open = words[0]->committed + 1;
  agreed.slots_complete = open > 0;
  for (int s = 0; s < job.num_slots; ++s) {
    agreed.slots_complete = agreed.slots_complete && SlotComplete(words, plan, s, open);
    const int writer = HostOfWriter(words, s);
    for (int h = 0; h < static_cast<int>(words.size()); ++h) {
      if (writer < 0 || writer == h) agreed.nonfinite[s] = std::max(agreed.nonfinite[s], words[h]->slots[s].nonfinite);
    }
  }
  if (const int h = HostOfRates(words); h >= 0) {
    agreed.learning_rates.assign(words[h]->learning_rates.begin(), words[h]->learning_rates.end());
    agreed.loss_scale = words[h]->loss_scale;
  }
  return agreed;
}

}  // namespace shardmesh
