// Fault points: named places in the step, the commit and the protocol, at which a test may let a process die, stop or
// wait (tests/testing/faulty_worker_main.cc). Only programs of tests set a hook; in all others a point is a load and a
// branch. Thread-safe.
#pragma once

#include <atomic>

namespace shardmesh {

enum class FaultPoint {
  kAssigned,
  kPrepared,
  kLetterTaken,
  kLetterDeclared,
  kPieceReceived,
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
};

struct FaultPointInfo {
  FaultPoint point;
  const char* name;
  bool lead;         // only the lead of a job comes there
  bool preparing;    // once for each job, before it is ready; else in steps
  const char* what;  // is the case
};

inline constexpr FaultPointInfo kFaultPoints[] = {
    {FaultPoint::kAssigned, "assigned", false, true, "a member has heard of a job, and built nothing of it"},
    {FaultPoint::kPrepared, "prepared", false, true, "it has the job's memory, and not said that it is ready"},
    {FaultPoint::kLetterTaken, "letter-taken", true, false,
     "a trainer's letter is taken, its slots are not declared yet"},
    {FaultPoint::kLetterDeclared, "letter-declared", true, false, "its slots are declared, the letter is not answered"},
    {FaultPoint::kPieceReceived, "piece-received", false, false,
     "a pushed piece lies in its window, and is not marked so"},
    {FaultPoint::kCommandWritten, "command-written", true, false, "the command is written, and not decided"},
    {FaultPoint::kDecided, "decided", true, false, "it is decided, and nobody was woken for it"},
    {FaultPoint::kCommandSeen, "command-seen", false, false, "a member has seen it, and not begun"},
    {FaultPoint::kChunkStepped, "chunk-stepped", false, false, "a chunk is stepped, and not counted as done"},
    {FaultPoint::kExecuted, "executed", false, false, "a member has executed the command, and not said so"},
    {FaultPoint::kDone, "done", false, false, "it has said so, and not woken the lead"},
    {FaultPoint::kParityTurned, "parity-turned", true, false,
     "in the commit: the shards' new places count, the step does not"},
    {FaultPoint::kOutcomeOpen, "outcome-open", true, false, "in the commit: the step's outcome is being written"},
    {FaultPoint::kStepCommitted, "step-committed", true, false,
     "in the commit: the step counts, the command is not over"},
    {FaultPoint::kCommitted, "committed", true, false, "the command is over, and nobody was woken for it"},
    {FaultPoint::kAnswering, "answering", true, false, "the step is committed, and a trainer's letter is not answered"},
};

using FaultHook = void (*)(FaultPoint point);
inline std::atomic<FaultHook> fault_hook{nullptr};

inline void Reach(FaultPoint point) {
  if (const FaultHook hook = fault_hook.load(std::memory_order_relaxed); hook != nullptr) hook(point);
}

}  // namespace shardmesh
