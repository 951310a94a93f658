// HostProgress: how far a host's control block is. The leads tell each other when they have met: where they meet again,
// since one was killed or a connection broke, some may have taken a round in that others have not, and so be a decision
// or a commit ahead. Who is behind does the same (SeveralHosts::CatchUp). Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/lead/hosts/seat_table.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

struct HostProgressHead {
  uint64_t decided = 0, committed = 0;  // seq
  int64_t committed_step = kNoStep;
  int64_t sources_step = 0;                        // ControlBlock::gradient_sources_step
  Command command;                                 // the newest that was decided
  uint64_t digests[kMaxHostRanks] = {};            // of its members, in the order of ranks
  uint8_t sources[kMaxSlots][kMaxHostRanks] = {};  // ControlBlock::gradient_sources
};

struct HostProgress : HostProgressHead {
  std::vector<double> learning_rates;  // of the command, if it is a step's: by parameter group
  std::vector<uint64_t> takers;        // with bucket residency: BucketWords::takers
  SeatTable seats;                     // with pulled slots
};

// As bytes, of which each host sends as many.
int64_t HostProgressBytes(const JobSpec& job, const Plan& plan);
void PackHostProgress(const HostProgress& progress, const Plan& plan, char* bytes);
HostProgress UnpackHostProgress(const char* bytes, const JobSpec& job, const Plan& plan);

HostProgress ReadHostProgress(const StepProtocol& protocol);

// InvalidArgument: what no host of this job can say, or hosts cannot say together: they are more than a decision and a
// commit apart, or have decided differently. `host`: the one that it is about then.
absl::Status CheckProgress(absl::Span<const HostProgress> all, const JobSpec& job, const Plan& plan, int& host);

// A host that has committed, or decided, what `mine` has not; -1: none.
int HostThatCommitted(absl::Span<const HostProgress> all, uint64_t seq);
int HostThatDecided(absl::Span<const HostProgress> all, uint64_t seq);

// With pulled slots: the newest table of all, or null where this host's is it.
const SeatTable* NewestSeats(absl::Span<const HostProgress> all, int mine);

// Takes over where the gradients of the open step count from, if a host has settled that and this one has not.
void AdoptSources(ControlBlock& control, absl::Span<const HostProgress> all);

}  // namespace shardmesh
