// What nvcc compiles and g++ calls of the fused pass: plain types. Each returns null on success, else the CUDA
// runtime's description of the error (static storage). Only in builds with --config=cuda. Thread-safe.
#pragma once

#include "kernels/cuda/fused_pass.h"
#include "kernels/cuda/pass_gate.h"

namespace shardmesh {

const char* LaunchPassGate(const PassGate& gate, void* stream);
const char* LaunchPassStep(const PassArgs& args, const OptimizerContext* warp, void* stream);
const char* LaunchPassSquares(const PassArgs& args, void* stream);
const char* LaunchPassArrival(const PassArrival& arrival, void* stream);

}  // namespace shardmesh
