// HostWords: what the lead of a host tells the leads of the others in a round (host_lead.h), and what follows from what
// all have said. Its facts are plain bytes, sent as they are, with the learning rates behind them: all hosts are of one
// build (the plan's hash and the epoch are compared when they meet). Pure functions, thread-safe.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// What lies on a host of one slot.
struct HostSlot {
  int64_t declared = 0;   // newest step declared there
  int64_t nonfinite = 0;  // NonFiniteWord of that
  uint64_t holder = 0;    // of its writer there, or of who asks for it (kAsking)
  uint64_t busy = 0;      // pushes and declarations of connected trainers are under way there
  uint64_t pieces = 0;    // of the open step: bit p: shard p's lies there
};
static_assert(kMaxHostRanks <= 64, "a bit for each shard");

struct HostFacts {
  uint64_t abort = 0;       // AbortWord, 0: none
  int64_t committed = 0;    // newest committed step
  uint64_t part = 0;        // number of the newest part of the work that this host has done
  uint64_t initial_id = 0;  // of the set of initial weights of which all members of the host have their pieces
  int32_t digest_wanted = 0;
  int32_t publish = -1;                  // the buffer set apart for the next version
  int32_t looks_again = 0;               // 1: ControlPage::looks_again is not 0
  int64_t rates_step = 0;                // the step that the learning rates are of
  double loss_scale = 1;                 // what the first slot to declare it there said
  uint64_t digests[kMaxHostRanks] = {};  // of its members, in the order of ranks, by the newest command if that asked
  HostSlot slots[kMaxSlots];
};

struct HostWords : HostFacts {
  std::vector<double> learning_rates;  // by parameter group: what the same slot said; zeros where rates_step is 0
};

// As bytes, of which a round sends as many for each host.
int64_t HostWordsBytes(const JobSpec& job);
void PackHostWords(const HostWords& words, char* bytes);
void UnpackHostWords(const char* bytes, const JobSpec& job, HostWords& words);

// What a host's page says now; but for `part` and `publish`.
HostWords ReadHostWords(const StepProtocol& protocol, const JobSpec& job, const Plan& plan);

// Views of all hosts' words, in their order.
using AllHostWords = absl::Span<const HostWords* const>;

// The host that has a slot's attached trainer, who does not ask any more: only what lies there counts. -1: none, and
// what lies on any host counts.
int HostOfWriter(AllHostWords words, int slot);

// The host whose trainer is given a slot that it asked for, in the round of `words`; `before`: the round before it. -1:
// none (host_slots.h).
int HostGiven(AllHostWords before, AllHostWords words, int slot);

// The first host whose slots have said learning rates for the open step. -1: none.
int HostOfRates(AllHostWords words);

// What all hosts agree on: a slot is complete when it is declared on one of them and each of its pieces lies on one of
// them. Learning rates are those of HostOfRates.
Agreed AgreedBy(AllHostWords words, const JobSpec& job, const Plan& plan);

// Slots that are complete, and stay so until the commit: whoever attaches waits for that, and what they said of
// learning rates and loss scale is what the first host said.
using SlotSet = std::bitset<kMaxSlots>;
SlotSet SettledSlots(AllHostWords words, const JobSpec& job, const Plan& plan);

// The host whose piece counts: the first that has it. -1: none has.
int HostOfPiece(AllHostWords words, int slot, int shard);

}  // namespace shardmesh
