#include "kernels/fused_step_cuda.h"

#include "absl/strings/str_cat.h"

#ifdef SHARDMESH_CUDA
#include "kernels/fused_step_kernel_cuda.h"
#endif

namespace shardmesh {

#ifdef SHARDMESH_CUDA

absl::Status CudaAvailable() {
  const char* error = CudaDeviceError();
  if (error == nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("no CUDA device: ", error));
}

absl::Status FusedStepCuda(const StepContext& context, const FusedRun& run, void* stream) {
  const char* error = LaunchFusedStep(context, run, stream);
  if (error == nullptr) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the CUDA runtime refused to launch the fused step: ", error));
}

#else

namespace {
absl::Status BuiltWithout() {
  return absl::UnimplementedError("this build has no CUDA; build with --config=cuda for the fused step on a GPU");
}
}  // namespace

absl::Status CudaAvailable() { return BuiltWithout(); }
absl::Status FusedStepCuda(const StepContext&, const FusedRun&, void*) { return BuiltWithout(); }

#endif

}  // namespace shardmesh
