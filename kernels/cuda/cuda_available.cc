#include "kernels/cuda/cuda_available.h"

#ifdef SHARDMESH_CUDA
#include "absl/strings/str_cat.h"
#include "kernels/cuda/device_memory_cuda.h"
#endif

namespace shardmesh {

absl::Status CudaAvailable() {
#ifdef SHARDMESH_CUDA
  const char* error = CudaDeviceError();
  return error == nullptr ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("no CUDA device: ", error));
#else
  return absl::UnimplementedError("this build has no CUDA; build with --config=cuda");
#endif
}

}  // namespace shardmesh
