// SeatTable: what a host's control block says of slots that are pulled (worker/control/pulled_words.h), as leads tell
// each other when they meet again. Every lead changes its own table alike, round by round (host_seats.h); where one
// took a round in that another has not, the other one takes the table over. Plain values, pure functions; for the
// lead's thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "worker/control/control_block.h"
#include "worker/control/host_ranks.h"

namespace shardmesh {

struct SeatTable {
  struct OfSlot {
    int64_t state = 0;
    int32_t window = 0, padding = 0;
    uint64_t digest = 0;
    int64_t tokens = 0, nonfinite = 0;
  };
  struct OfSeat {
    uint64_t session = 0;
    int64_t windows[kWindowsOfSeat] = {};
    int32_t host_of_window[kWindowsOfSeat] = {};
  };
  uint64_t rounds = 0;  // PulledWords::rounds
  int64_t peak = 0;
  OfSlot slots[kMaxSlots];
  OfSeat seats[kMaxTrainers];
  int64_t partials[kMaxPartials] = {};
};

SeatTable ReadSeatTable(const ControlBlock& control, const JobSpec& job);

// InvalidArgument: what no host of this job can say.
absl::Status CheckSeatTable(const SeatTable& table, const JobSpec& job, const Plan& plan, int num_hosts);

// Whether `one` is of a newer round than `other`. One that a lead was changing when it was killed is older than any
// whole one.
bool IsNewer(const SeatTable& one, const SeatTable& other);

// Makes it this host's. Slots that trainers of this host write are in time from `now_nanos` on.
void AdoptSeatTable(ControlBlock& control, const SeatTable& table, const JobSpec& job, int64_t now_nanos);

}  // namespace shardmesh
