// The gate before the kernels of a command, and the arrival behind them: so that kernels can be given to a stream ahead
// of the decision of their command, and never wait without an end.
//
// The gate is one thread. It waits until a word, which the host or a peer writes, reaches the command's number, until
// the abort word is not 0, or until a time limit by the device's clock. Its verdict is a word of device memory, which
// the kernels behind it in the stream look at first: unless it says open they change no byte. The arrival, behind them,
// release-stores the result into memory of the host. One thread waits, not every block of a pass: blocks that waited
// would keep the multiprocessors from the very workers of the same device that they wait for.
//
// Compiled for both machines: `Machine` has LoadAcquire, StoreRelease (system scope), Nanos and Pause.
#pragma once

#include <cstdint>

#include "core/base/host_device.h"

namespace shardmesh {

enum class GateVerdict : uint32_t { kNone = 0, kOpen = 1, kAborted = 2, kLate = 3 };

// A verdict on a command, in one word.
SHARDMESH_RULE uint64_t GateWord(uint64_t seq, GateVerdict verdict) {
  return seq << 2 | static_cast<uint64_t>(verdict);
}
SHARDMESH_RULE GateVerdict VerdictOf(uint64_t word, uint64_t seq) {
  return word >> 2 == seq ? static_cast<GateVerdict>(word & 3) : GateVerdict::kNone;
}

struct PassGate {
  uint64_t seq = 0;
  const uint64_t* decided = nullptr;  // opens at `seq`
  const uint64_t* abort = nullptr;    // not 0: aborted; looked at first
  uint64_t timeout_nanos = 0;
  uint64_t* verdict = nullptr;
};

template <class Machine>
SHARDMESH_RULE void AwaitGate(const PassGate& gate, Machine& machine) {
  const uint64_t begin = machine.Nanos();
  GateVerdict verdict = GateVerdict::kNone;
  while (verdict == GateVerdict::kNone) {
    if (machine.LoadAcquire(gate.abort) != 0) {
      verdict = GateVerdict::kAborted;
    } else if (machine.LoadAcquire(gate.decided) >= gate.seq) {
      verdict = GateVerdict::kOpen;
    } else if (machine.Nanos() - begin > gate.timeout_nanos) {
      verdict = GateVerdict::kLate;
    } else {
      machine.Pause();
    }
  }
  machine.StoreRelease(gate.verdict, GateWord(gate.seq, verdict));
}

struct PassArrival {
  const uint64_t* verdict = nullptr;
  uint64_t* result = nullptr;  // of the host: gets the verdict, when all before it in the stream is done
};

template <class Machine>
SHARDMESH_RULE void Arrive(const PassArrival& arrival, Machine& machine) {
  machine.StoreRelease(arrival.result, machine.LoadAcquire(arrival.verdict));
}

}  // namespace shardmesh
