// Fault points: named places in the preparing of a job, in calls, in the step, the commit and the protocol, and in
// saving and loading checkpoints, at which a test may let a process die, stop or wait, and at some of them the code
// that is there meet an error (tests/testing/faulty_worker_main.cc). Only programs of tests set a hook; in all others a
// point is a load and a branch. Thread-safe.
#pragma once

#include <atomic>

#include "absl/status/status.h"

namespace shardmesh {

enum class FaultPoint {
  kAssigned,
  kPrepared,
  kStaged,
  kEpochEnding,
  kEpochEnded,
  kShardMoved,
  kAttaching,
  kPulling,
  kStepCalled,
  kMessageTaken,
  kMessageDeclared,
  kGradientShardReceived,
  kCommandWritten,
  kDecided,
  kCommandSeen,
  kChunkStepped,
  kExecuted,
  kDone,
  kParityTurned,
  kOutcomeOpen,
  kStepCommitted,
  kCommitted,
  kAnswering,
  kSlotTaken,
  kSlotFinished,
  kMergeCounted,
  kFileChange,
  kFileRead,
  kUseLoaded,
};

// When a process comes to a point.
enum class FaultStage {
  kPreparing,  // once for each job, before it is ready
  kMoving,     // of a job that re-forms, or is resharded
  kCalling,    // in calls of trainers and readers, at the worker that they call
  kStepping,   // in every step
  kPulled,     // in every step of a job whose slots are pulled
  kSaving,     // of a checkpoint: in workers and in who asks them to
  kLoading,    // the same
};

struct FaultPointInfo {
  FaultPoint point;
  const char* name;
  FaultStage stage;
  bool lead;         // only the lead of a job comes there
  bool can_fail;     // an error that is injected there reaches whoever waits for it
  const char* what;  // is the case
};

inline constexpr FaultPointInfo kFaultPoints[] = {
    {FaultPoint::kAssigned, "assigned", FaultStage::kPreparing, false, true,
     "a member has heard of a job, and built nothing of it"},
    {FaultPoint::kPrepared, "prepared", FaultStage::kPreparing, false, true,
     "it has the job's memory, and not said that it is ready"},
    {FaultPoint::kStaged, "staged", FaultStage::kMoving, false, true,
     "a member has the memory for a job's next mesh, and not said so; the job trains on"},
    {FaultPoint::kEpochEnding, "epoch-ending", FaultStage::kMoving, false, false,
     "it is to end its part in the older epoch, and has not begun to"},
    {FaultPoint::kEpochEnded, "epoch-ended", FaultStage::kMoving, false, false,
     "its part in the older epoch is over, and nothing of its shard has moved"},
    {FaultPoint::kShardMoved, "shard-moved", FaultStage::kMoving, false, false,
     "its shard has moved, and it has not said so"},
    {FaultPoint::kAttaching, "attaching", FaultStage::kCalling, false, true,
     "a trainer has its slots, and not their memory"},
    {FaultPoint::kPulling, "pulling", FaultStage::kCalling, false, true,
     "weights are chosen for a reader or trainer, and nothing of them is sent"},
    {FaultPoint::kStepCalled, "step-called", FaultStage::kCalling, false, true,
     "a connected trainer's call of a step is there, its slots are not declared yet"},
    {FaultPoint::kMessageTaken, "message-taken", FaultStage::kStepping, true, true,
     "a trainer's message is taken, its slots are not declared yet"},
    {FaultPoint::kMessageDeclared, "message-declared", FaultStage::kStepping, true, false,
     "its slots are declared, the message is not answered"},
    {FaultPoint::kGradientShardReceived, "shard-received", FaultStage::kStepping, false, true,
     "a pushed gradient shard lies in its window, and is not marked so"},
    {FaultPoint::kCommandWritten, "command-written", FaultStage::kStepping, true, false,
     "the command is written, and not decided"},
    {FaultPoint::kDecided, "decided", FaultStage::kStepping, true, false, "it is decided, and nobody was woken for it"},
    {FaultPoint::kCommandSeen, "command-seen", FaultStage::kStepping, false, false,
     "a member has seen it, and not begun"},
    {FaultPoint::kChunkStepped, "chunk-stepped", FaultStage::kStepping, false, false,
     "a chunk is stepped, and not counted as done"},
    {FaultPoint::kExecuted, "executed", FaultStage::kStepping, false, false,
     "a member has executed the command, and not said so"},
    {FaultPoint::kDone, "done", FaultStage::kStepping, false, false, "it has said so, and not woken the lead"},
    {FaultPoint::kParityTurned, "parity-turned", FaultStage::kStepping, true, false,
     "in the commit: the shards' new places count, the step does not"},
    {FaultPoint::kOutcomeOpen, "outcome-open", FaultStage::kStepping, true, false,
     "in the commit: the step's outcome is being written"},
    {FaultPoint::kStepCommitted, "step-committed", FaultStage::kStepping, true, false,
     "in the commit: the step counts, the command is not over"},
    {FaultPoint::kCommitted, "committed", FaultStage::kStepping, true, false,
     "the command is over, and nobody was woken for it"},
    {FaultPoint::kAnswering, "answering", FaultStage::kStepping, true, false,
     "the step is committed, and a trainer's message is not answered"},
    {FaultPoint::kSlotTaken, "slot-taken", FaultStage::kPulled, true, false,
     "a trainer has a slot, which does not count as taken"},
    {FaultPoint::kSlotFinished, "slot-finished", FaultStage::kPulled, true, false,
     "a trainer's result counts, and its window is not the workers'"},
    {FaultPoint::kMergeCounted, "merge-counted", FaultStage::kPulled, true, false,
     "in the commit: a sum of slots counts, and what it is made of does too"},
    {FaultPoint::kFileChange, "file-change", FaultStage::kSaving, false, true,
     "a file or folder is about to be made, written, synced, renamed or removed"},
    {FaultPoint::kFileRead, "file-read", FaultStage::kLoading, false, true, "a file is about to be looked at, or read"},
    {FaultPoint::kUseLoaded, "use-loaded", FaultStage::kLoading, false, true,
     "all members have loaded, and one is about to be told to begin with it"},
};

// An error: only at points that can fail.
using FaultHook = absl::Status (*)(FaultPoint point);
inline std::atomic<FaultHook> fault_hook{nullptr};

// At a point that can fail: the error that is injected there.
inline absl::Status ErrorAt(FaultPoint point) {
  const FaultHook hook = fault_hook.load(std::memory_order_relaxed);
  return hook == nullptr ? absl::OkStatus() : hook(point);
}

// At all others.
inline void Reach(FaultPoint point) {
  if (const FaultHook hook = fault_hook.load(std::memory_order_relaxed); hook != nullptr) hook(point).IgnoreError();
}

}  // namespace shardmesh
