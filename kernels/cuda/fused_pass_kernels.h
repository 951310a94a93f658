// PassKernels: how the kernels of a fused pass, and of digests and copies, are given to a stream. Thread-safe.
//
// In builds with --config=cuda there are the device's; a test has others, which walk the same bodies on the CPU.
#pragma once

#include <cstdint>

#include "kernels/cuda/fused_pass.h"
#include "kernels/cuda/pass_gate.h"
#include "kernels/cuda/stretch_digest.h"

namespace shardmesh {

// Each returns null on success, else the CUDA runtime's description of the error (static storage). `stream`: a
// cudaStream_t of the calling thread's current context. Arguments are copied before the return.
class PassKernels {
 public:
  virtual ~PassKernels() = default;
  virtual const char* Gate(const PassGate& gate, void* stream) const = 0;
  // `warp`: a context of the formats that all runs have, for the body that is compiled for them; null: there is none
  // (SharedWarpContext).
  virtual const char* Step(const PassArgs& args, const OptimizerContext* warp, void* stream) const = 0;
  virtual const char* Squares(const PassArgs& args, void* stream) const = 0;
  virtual const char* Arrival(const PassArrival& arrival, void* stream) const = 0;
  virtual const char* Digests(const StretchDigests& args, void* stream) const = 0;
  virtual const char* Copies(const StretchCopies& args, void* stream) const = 0;
};

// The device's; null in builds without CUDA.
const PassKernels* BuiltPassKernels();

}  // namespace shardmesh
