#include "kernels/cuda/fused_pass_kernels.h"

#ifdef SHARDMESH_CUDA
#include "kernels/cuda/fused_pass_launch_cuda.h"
#include "kernels/cuda/stretch_digest_launch_cuda.h"
#endif

namespace shardmesh {

#ifdef SHARDMESH_CUDA

namespace {

class CudaPassKernels final : public PassKernels {
 public:
  const char* Gate(const PassGate& gate, void* stream) const override { return LaunchPassGate(gate, stream); }
  const char* Step(const PassArgs& args, const OptimizerContext* warp, void* stream) const override {
    return LaunchPassStep(args, warp, stream);
  }
  const char* Squares(const PassArgs& args, void* stream) const override { return LaunchPassSquares(args, stream); }
  const char* Arrival(const PassArrival& arrival, void* stream) const override {
    return LaunchPassArrival(arrival, stream);
  }
  const char* Digests(const StretchDigests& args, void* stream) const override {
    return LaunchStretchDigests(args, stream);
  }
  const char* Copies(const StretchCopies& args, void* stream) const override {
    return LaunchStretchCopies(args, stream);
  }
};

}  // namespace

const PassKernels* BuiltPassKernels() {
  static const CudaPassKernels kernels;
  return &kernels;
}

#else

const PassKernels* BuiltPassKernels() { return nullptr; }

#endif

}  // namespace shardmesh
