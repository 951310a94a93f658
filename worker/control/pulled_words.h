// PulledWords: the words of a job whose slots are pulled (JobSpec::slot_mode), in the control block (control_block.h).
//
// A trainer attaches to a seat, which has two gradient windows and a mailbox. It takes the next open slot, writes its
// gradients into a window that it is told, and finishes the slot: from then on the window is the workers'. The lead
// sums what is finished along the tree over slots (core/base/reduction.h), whatever the order in which it came: when
// all slots of a subtree are there, kMerge adds them up into one partial sum, of which every worker has its shard
// (gradient_sums.h), and the windows are free again. The step is decided when one partial sum has all slots.
//
//   slot     open -> taken -> finished -> merged. Taken and not finished in time, or by a trainer that is gone: open
//            again. The first result that is finished counts, whoever brings it.
//   window   free -> written -> result (not merged yet) -> free
//   partial  free -> the sum of a stretch of slots -> free, when it is part of a larger one
//
// Words hold the step that they are of: those of another step than the open one mean open and free, so a commit leaves
// them as they are. All are written by the lead's engine, but `session` and `waits`, zero at creation, and read by
// every worker while kMerge or a step is executed.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/job/job.h"

namespace shardmesh {

enum class SlotState : uint8_t { kOpen = 0, kTaken = 1, kFinished = 2, kMerged = 3 };
enum class WindowState : uint8_t { kFree = 0, kWritten = 1, kResult = 2 };

inline constexpr int kWindowsOfSeat = 2;
// SlotPlan::num_partials() (core/job/plan.h) with kMaxTrainers and kMaxSlots.
inline constexpr int kMaxPartials = kMaxTrainers * 13 / 4 + 2;

// 16 bits of a step; of another step they are 0.
constexpr int64_t OfStep(int64_t step, int bits) { return step << 16 | bits; }
constexpr int BitsOf(int64_t word, int64_t step) { return word >> 16 == step ? static_cast<int>(word & 0xffff) : 0; }

struct alignas(64) PulledSlotWords {
  std::atomic<int64_t> state;        // OfStep: a SlotState
  std::atomic<int32_t> window;       // seat * kWindowsOfSeat + window: of the newest taker; of the result, if finished
  std::atomic<int64_t> until_nanos;  // of kTaken: then it is open again
  std::atomic<uint64_t> digest;      // of the result's gradients, as its trainer computed it
};

struct alignas(64) SeatWords {
  std::atomic<uint64_t> session;                 // whose words these are: a holder (control_block.h)
  std::atomic<int64_t> windows[kWindowsOfSeat];  // OfStep: a WindowState << 8 | slot
  std::atomic<int32_t> waits;                    // 1: its trainer asked for a slot
  std::atomic<int64_t> waits_since_nanos;
  std::atomic<int64_t> idle_nanos, slots_finished;  // for people: in waits; results that counted
  std::atomic<int32_t> host_of_window[kWindowsOfSeat];  // of a job on several hosts: where its newest result lies
};

struct PulledWords {
  PulledSlotWords slots[kMaxSlots];
  SeatWords seats[kMaxTrainers];
  std::atomic<int64_t> partials[kMaxPartials];  // OfStep: first slot << 8 | number of slots
  std::atomic<int64_t> peak;                    // OfStep: most gradients alive at a time
  std::atomic<int64_t> reopened, differing;     // for people: slots taken back; second results with other bits
  std::atomic<uint64_t>
      rounds;  // of a job on several hosts: twice those that the words follow from; odd: more is on its way
};

}  // namespace shardmesh
