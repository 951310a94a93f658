#include "worker/lead/hosts/host_slots.h"

#include <algorithm>

#include "local/memory/futex.h"
#include "worker/control/residency.h"

namespace shardmesh {

void MirrorSlots(StepProtocol& protocol, AllHostWords words, int host, int num_slots) {
  ControlBlock& control = *protocol.control();
  bool changed = false, look = false;
  for (int h = 0; h < static_cast<int>(words.size()); ++h) look = look || (h != host && words[h]->looks_again != 0);
  control.elsewhere_looks_again.store(look ? 1 : 0);
  for (int s = 0; s < num_slots; ++s) {
    int64_t declared = 0;
    uint64_t holder = 0, gradient_shards = 0;
    for (int h = 0; h < static_cast<int>(words.size()); ++h) {
      if (h == host) continue;
      declared = std::max(declared, words[h]->slots[s].declared);
      gradient_shards |= words[h]->slots[s].gradient_shards;
      if (holder == 0) holder = words[h]->slots[s].holder;
    }
    control.elsewhere[s].gradient_shards.store(gradient_shards);
    control.elsewhere[s].declared.store(declared);
    changed =
        control.elsewhere[s].holder.exchange(holder) != holder || changed;  // last: who sees it gone sees the rest
  }
  if (changed) FutexBump(control.finished);
}

void MirrorBuckets(StepProtocol& protocol, AllHostWords words, int host, const Plan& plan) {
  if (!plan.bucketed() || plan.pulled()) return;  // of pulled slots nothing is declared by bucket
  const ResidencyTable table(protocol.control(), plan);
  const int64_t open = words[host]->committed + 1;
  bool changed = false;
  for (int s = 0; s < plan.slots().num_slots; ++s) {
    int64_t waiting = 0;
    for (int h = 0; h < static_cast<int>(words.size()); ++h) waiting += h != host && words[h]->slots[s].waiting != 0;
    changed = table.waiting_elsewhere(s).exchange(waiting) != waiting || changed;
    for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
      bool complete = !plan.buckets()[b].frozen;
      for (int p = 0; p < plan.num_shards() && complete; ++p) complete = HostOfShard(words, s, p, b) >= 0;
      const int64_t declared = complete ? open : 0;
      changed = table.elsewhere(b, s).exchange(declared) != declared || changed;
    }
  }
  if (changed) FutexBump(protocol.control()->finished);
}

void SettleSlots(StepProtocol& protocol, AllHostWords before, AllHostWords words, int host, int num_slots) {
  for (int s = 0; s < num_slots; ++s) {
    const uint64_t mine = words[host]->slots[s].holder;
    const int given = HostGiven(before, words, s), writer = HostOfWriter(words, s);
    if (given >= 0) protocol.slots().TakeShardsBack(Slot(s));
    if ((mine & kAsking) == 0) continue;
    if (given == host) protocol.slots().EndAsking(Slot(s), mine, /*given=*/true);
    if ((given >= 0 && given != host) || writer >= 0) protocol.slots().EndAsking(Slot(s), mine, /*given=*/false);
  }
}

bool AnyAsks(AllHostWords words, int num_slots) {
  for (const HostWords* host : words) {
    for (int s = 0; s < num_slots; ++s) {
      if ((host->slots[s].holder & kAsking) != 0) return true;
    }
  }
  return false;
}

}  // namespace shardmesh
