#include "kernels/optimizer_step_cuda.h"

#include "absl/strings/str_cat.h"

#ifdef SHARDMESH_CUDA
#include "kernels/optimizer_step_kernel_cuda.h"
#include "kernels/tile/walk.h"
#endif

namespace shardmesh {

#ifdef SHARDMESH_CUDA

absl::Status OptimizerStepCuda(const OptimizerContext& context, const OptimizerRun& run, void* stream) {
  if (context.weights == WeightFormat::kInt8Row) {
    return absl::UnimplementedError("int8_row weights have no CUDA kernel; step them on the CPU");
  }
  const char* error = LaunchOptimizerStep(context, run, PlanStep(context, run), stream);
  if (error == nullptr) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the CUDA runtime refused to launch the optimizer step: ", error));
}

#else

absl::Status OptimizerStepCuda(const OptimizerContext&, const OptimizerRun&, void*) {
  return absl::UnimplementedError("this build has no CUDA; build with --config=cuda for the optimizer step on a GPU");
}

#endif

}  // namespace shardmesh
