#include "worker/collectives/device_runtime.h"

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "worker/collectives/shared_library.h"

namespace shardmesh {
namespace {

CudaAddress AddressOf(const void* memory) { return reinterpret_cast<CudaAddress>(memory); }

absl::StatusOr<CudaDriverApi> LoadDriver(const std::string& path) {
  const auto library = SharedLibrary::Open({path.empty() ? "libcuda.so.1" : path});
  if (!library.ok()) {
    return absl::UnavailableError(
        absl::StrCat("no CUDA driver here: ", library.status().message(), "; it comes with the GPU's driver"));
  }
  CudaDriverApi api = {};
#define SHARDMESH_FIND(name)                                                                                   \
  api.name = reinterpret_cast<decltype(CudaDriverApi::name)>(library->Find("cu" #name));                       \
  if (api.name == nullptr) {                                                                                   \
    return absl::UnimplementedError(                                                                           \
        absl::StrCat(library->path(), " has no function cu" #name "; install a driver for CUDA 12 or newer")); \
  }
  SHARDMESH_CUDA_DRIVER_FUNCTIONS(SHARDMESH_FIND)
#undef SHARDMESH_FIND
  return api;
}

}  // namespace

absl::Status DeviceRuntime::Failed(absl::string_view what, int error) const {
  const char* words = nullptr;
  if (api_.GetErrorString(error, &words) != kCudaSuccess || words == nullptr) words = "an unknown error";
  const std::string message =
      absl::StrCat("CUDA device ", device_, " cannot ", what, ": ", words, " (CUresult ", error, ")");
  return error == kCudaOutOfMemory ? absl::ResourceExhaustedError(message) : absl::UnavailableError(message);
}

absl::StatusOr<std::unique_ptr<DeviceRuntime>> DeviceRuntime::Open(int device, const std::string& library) {
  ASSIGN_OR_RETURN(const CudaDriverApi api, LoadDriver(library));
  std::unique_ptr<DeviceRuntime> runtime(new DeviceRuntime(api, device));
  int error = api.Init(0);
  if (error == kCudaSuccess) error = api.DeviceGet(&runtime->handle_, device);
  if (error == kCudaSuccess) error = api.DevicePrimaryCtxRetain(&runtime->context_, runtime->handle_);
  if (error != kCudaSuccess) return runtime->Failed("be opened", error);
  Scope scope(*runtime);
  error = api.StreamCreate(&runtime->stream_, kCudaStreamNonBlocking);
  if (error != kCudaSuccess) return runtime->Failed("make a stream", error);
  return runtime;
}

DeviceRuntime::~DeviceRuntime() {
  if (context_ == nullptr) return;
  if (stream_ != nullptr) {
    Scope scope(*this);
    api_.StreamDestroy_v2(stream_);
  }
  api_.DevicePrimaryCtxRelease_v2(handle_);
}

DeviceRuntime::Scope::Scope(const DeviceRuntime& device) : device_(device) {
  device_.api_.CtxPushCurrent_v2(device_.context_);
}

DeviceRuntime::Scope::~Scope() {
  void* context = nullptr;
  device_.api_.CtxPopCurrent_v2(&context);
}

absl::StatusOr<char*> DeviceRuntime::Allocate(int64_t bytes) {
  CudaAddress memory = 0;
  const int error = api_.MemAlloc_v2(&memory, static_cast<size_t>(bytes));
  if (error != kCudaSuccess) return Failed(absl::StrCat("allocate ", bytes, " bytes"), error);
  return reinterpret_cast<char*>(memory);
}

void DeviceRuntime::Free(char* memory) {
  if (memory != nullptr) api_.MemFree_v2(AddressOf(memory));
}

bool DeviceRuntime::Owns(const void* memory) const {
  unsigned type = 0;
  int device = -1;
  return api_.PointerGetAttribute(&type, kCudaAttributeMemoryType, AddressOf(memory)) == kCudaSuccess &&
         type == kCudaMemoryTypeDevice &&
         api_.PointerGetAttribute(&device, kCudaAttributeDeviceOrdinal, AddressOf(memory)) == kCudaSuccess &&
         device == device_;
}

absl::Status DeviceRuntime::Copy(void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const int error = api_.MemcpyAsync(AddressOf(to), AddressOf(from), static_cast<size_t>(bytes), stream_);
  return error == kCudaSuccess ? absl::OkStatus() : Failed(absl::StrCat("copy ", bytes, " bytes"), error);
}

absl::StatusOr<bool> DeviceRuntime::Idle() const {
  const int error = api_.StreamQuery(stream_);
  if (error == kCudaSuccess || error == kCudaNotReady) return error == kCudaSuccess;
  return Failed("go on", error);
}

}  // namespace shardmesh
