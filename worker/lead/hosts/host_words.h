// HostWords: what the lead of a host tells the leads of the others in a round (host_lead.h), and what follows from what
// all have said: the facts of the next decision (worker/step/facts.h).
//
// A round sends HostFacts, which are plain bytes, and the learning rates behind them; with bucket residency a second
// message has the buckets, as many as the host with the most has. All hosts are of one build (the plan's hash and the
// epoch are compared when they meet); what cannot be is refused by name (CheckWords). Pure functions, thread-safe.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/step/facts.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// What lies on a host of one slot.
struct HostSlot {
  int64_t declared = 0;   // newest step declared there
  int64_t nonfinite = 0;  // NonFiniteWord of that
  int64_t tokens = 0;     // with token weights: of that
  uint64_t holder = 0;    // of its writer there, or of who asks for it (kAsking)
  uint64_t busy = 0;      // pushes and declarations of connected trainers are under way there
  uint64_t gradient_shards = 0;  // of the open step: bit p: shard p's lies there
  uint64_t waiting = 0;   // with bucket residency: its trainer waits until fewer of its buckets are ahead of the sums
};
static_assert(kMaxHostRanks <= 64, "a bit for each shard");

// With pulled slots: what a host says of a seat (host_seats.h). Slots in `slots` are then seats, but for nothing that
// is declared or lies there.
struct HostSeat {
  int32_t waits = 0;     // its trainer waits for a slot
  int32_t late = 0;      // and should have finished the one that it has
  int32_t finishes = 0;  // it has finished one, which is not counted yet: what follows is of that
  int32_t slot = 0;
  int64_t step = 0;
  uint64_t digest = 0;
  int64_t tokens = 0;
  int64_t non_finite = -1;  // a tensor
};

// A gradient window of a seat, and the host that its result lies on.
struct SeatWindow {
  int seat = 0, window = 0, host = 0;
};

// With bucket residency: what lies on a host of a bucket.
struct HostBucket {
  // In place of a slot: how its window uses the bucket. With pulled slots nothing else is said.
  static constexpr int32_t kWindow = -1;
  static constexpr uint64_t kUsed = 1, kHeld = 2;

  int32_t bucket = 0;
  int32_t slot = kWindow;
  uint64_t bits = 0;  // of a slot: bit p: the open step's gradient of shard p lies there; of the window: kUsed, kHeld
};
// Of slots in one round: those of the first buckets come first, the others when these are summed.
inline constexpr int kMaxHostBuckets = 1 << 14;

struct HostFacts {
  uint64_t abort = 0;       // AbortWord, 0: none
  int64_t committed = 0;    // newest committed step
  uint64_t part = 0;        // number of the newest part of the work that this host has done
  uint64_t initial_id = 0;  // of the set of initial weights of which all members of the host have their parts
  uint64_t loaded_id = 0;   // the same of a checkpoint
  int64_t loaded_step = 0;
  int32_t digest_wanted = 0, publish_wanted = 0;
  int32_t publish = -1;      // the buffer set apart for the next version
  int32_t looks_again = 0;   // 1: ControlBlock::looks_again is not 0
  int32_t num_buckets = 0;  // HostBuckets that it says
  int32_t comes_back = 0;   // 1: should its lead be killed, the next incarnation goes on
  uint16_t open = 0;        // 1: a command is decided and not committed
  uint16_t ends = 0;        // 1: ControlBlock::ends
  int32_t restored = 0;     // 1: all its members have filled their shards with those of the next step
  int64_t restored_step_plus_one = 0;  // of ControlBlock
  int64_t rates_step = 0;    // the step that the learning rates are of
  double loss_scale = 1;     // what the first slot to declare it there said
  uint64_t digests[kMaxHostRanks] = {};  // of its members, in the order of ranks, by the newest command if that asked
  HostSlot slots[kMaxSlots];
  HostSeat seats[kMaxTrainers];
};

struct HostWords : HostFacts {
  std::vector<double> learning_rates;  // by parameter group: what the same slot said; zeros where rates_step is 0
  std::vector<HostBucket> buckets;     // by bucket, then slot; those that have a bit
};

// As bytes, of which a round sends as many for each host; without the buckets.
int64_t HostWordsBytes(const JobSpec& job);
void PackHostWords(const HostWords& words, char* bytes);
void UnpackHostWords(const char* bytes, const JobSpec& job, HostWords& words);

// What a host's control block says now; but for `part` and `publish`.
HostWords ReadHostWords(const StepProtocol& protocol, const JobSpec& job, const Plan& plan);

// InvalidArgument: what no host of this job can say; the message names the fact. First of the words, then of the
// buckets.
absl::Status CheckWords(const HostWords& words, const JobSpec& job, const Plan& plan);
absl::Status CheckBuckets(const HostWords& words, const JobSpec& job, const Plan& plan);

// Views of all hosts' words, in their order.
using AllHostWords = absl::Span<const HostWords* const>;

// InvalidArgument: what hosts say cannot be true together: trainers attached to a slot on two, other committed steps.
// `host`: the second one then.
absl::Status CheckTogether(AllHostWords words, const JobSpec& job, int& host);

// The host that has a slot's attached trainer, who does not ask any more: only what lies there counts. -1: none, and
// what lies on any host counts.
int HostOfWriter(AllHostWords words, int slot);

// The host whose trainer is given a slot that it asked for, in the round of `words`; `before`: the round before it. -1:
// none (host_slots.h).
int HostGiven(AllHostWords before, AllHostWords words, int slot);

bool SaidTheSame(const HostWords& one, const HostWords& other);  // learning rates and loss scale
// The first host whose slots have said learning rates for the open step. -1: none.
int HostOfRates(AllHostWords words);

// The facts that all hosts agree on: `committed` (ReadCommitted), which is the same on all, and what all have said. A
// slot is complete when it is declared on one of them and each of its gradient shards lies on one of them. Learning
// rates are those of HostOfRates. `control`: this host's, for which buckets are summed, and, with pulled slots, for all
// that is said of the open step.
Facts MergeFacts(AllHostWords words, const Committed& committed, const JobSpec& job, const Plan& plan,
                 ControlBlock& control);

// Slots that are complete, and stay so until the commit: whoever attaches waits for that, and what they said of
// learning rates and loss scale is what the first host said. None with bucket residency.
using SlotSet = std::bitset<kMaxSlots>;
SlotSet SettledSlots(AllHostWords words, const JobSpec& job, const Plan& plan);

// The host whose gradient shard counts: the first that has it. -1: none has. `bucket`: of that one, with bucket
// residency.
int HostOfShard(AllHostWords words, int slot, int shard, int bucket = -1);

// Hosts whose windows use a bucket, or hold it: bit h.
using HostSet = uint64_t;
static_assert(kMaxHostRanks <= 64, "a bit for each host");
HostSet HostsWith(AllHostWords words, int bucket, uint64_t bits);

}  // namespace shardmesh
