// The program shardmesh-worker but for where its CUDA comes from, which a test replaces. One call in a process.
#pragma once

#include <string>

#include "kernels/cuda/fused_pass_kernels.h"

namespace shardmesh {

struct WorkerCuda {
  const PassKernels* kernels = BuiltPassKernels();
  std::string library;  // the driver's; "": the system's
};

// Returns the exit status.
int RunWorkerMain(int argc, char** argv, const WorkerCuda& cuda);

}  // namespace shardmesh
