// What nvcc compiles and g++ calls: plain types only. Every function returns null on success, else the CUDA runtime's
// description of the error (static storage).
#pragma once

#include "kernels/fused_step.h"

namespace shardmesh {

const char* CudaDeviceError();
const char* LaunchFusedStep(const StepContext& context, const FusedRun& run, void* stream);

}  // namespace shardmesh
