// shardmesh-worker on a machine without a GPU, for tests of --device cuda:N: the CUDA driver is the stand-in, and the
// kernels are walked on the CPU.
#include "worker/pass/device/testing/emulated_kernels.h"
#include "worker/run_worker_main.h"

int main(int argc, char** argv) {
  shardmesh::TheStandIn().GuardMemory();
  static const shardmesh::EmulatedKernels kernels;
  return shardmesh::RunWorkerMain(argc, argv, {&kernels, shardmesh::kStandInPath});
}
