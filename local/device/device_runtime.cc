#include "local/device/device_runtime.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/device/shared_library.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSpin = absl::Microseconds(200);  // then a wait looks less often
constexpr absl::Duration kLook = absl::Microseconds(50);

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
  if (error == kCudaOutOfMemory) return absl::ResourceExhaustedError(message);
  return error == kCudaNotSupported ? absl::UnimplementedError(message) : absl::UnavailableError(message);
}

absl::StatusOr<std::unique_ptr<DeviceRuntime>> DeviceRuntime::Open(int device, const std::string& library) {
  ASSIGN_OR_RETURN(const CudaDriverApi api, LoadDriver(library));
  std::unique_ptr<DeviceRuntime> runtime(new DeviceRuntime(api, device));
  int error = api.Init(0);
  if (error == kCudaSuccess) error = api.DeviceGet(&runtime->handle_, device);
  if (error == kCudaSuccess) error = api.DevicePrimaryCtxRetain(&runtime->context_, runtime->handle_);
  char name[128] = {};
  CudaUuid uuid = {};
  if (error == kCudaSuccess) error = api.DeviceGetName(name, sizeof(name) - 1, runtime->handle_);
  if (error == kCudaSuccess) error = api.DeviceGetUuid_v2(&uuid, runtime->handle_);
  if (error != kCudaSuccess) return runtime->Failed("be opened", error);
  runtime->name_ = name;
  runtime->uuid_.assign(uuid.bytes, sizeof(uuid.bytes));
  runtime->library_ = library;
  Scope scope(*runtime);
  error = api.StreamCreate(&runtime->stream_, kCudaStreamNonBlocking);
  if (error != kCudaSuccess) return runtime->Failed("make a stream", error);
  return runtime;
}

absl::StatusOr<std::unique_ptr<DeviceRuntime>> DeviceRuntime::OpenUuid(const std::string& uuid,
                                                                       const std::string& library) {
  ASSIGN_OR_RETURN(const CudaDriverApi api, LoadDriver(library));
  int count = 0;
  if (const int error = api.Init(0); error != kCudaSuccess) return DeviceRuntime(api, 0).Failed("be opened", error);
  if (const int error = api.DeviceGetCount(&count); error != kCudaSuccess) {
    return DeviceRuntime(api, 0).Failed("be counted", error);
  }
  for (int device = 0; device < count; ++device) {
    int handle = 0;
    CudaUuid found = {};
    if (api.DeviceGet(&handle, device) != kCudaSuccess) continue;
    if (api.DeviceGetUuid_v2(&found, handle) != kCudaSuccess) continue;
    if (uuid == std::string(found.bytes, sizeof(found.bytes))) return Open(device, library);
  }
  return absl::NotFoundError(absl::StrCat("none of the ", count, " CUDA devices that this process sees has the uuid ",
                                          absl::BytesToHexString(uuid), "; see CUDA_VISIBLE_DEVICES"));
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

absl::Status DeviceRuntime::AwaitIdle(absl::Duration timeout) const {
  const absl::Time begin = MonotonicNow(), deadline = begin + timeout;
  while (true) {
    ASSIGN_OR_RETURN(const bool idle, Idle());
    if (idle) return absl::OkStatus();
    const absl::Time now = MonotonicNow();
    if (now > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("CUDA device ", device_, " was not done with its stream within ",
                                                      absl::FormatDuration(timeout)));
    }
    if (now - begin > kSpin) absl::SleepFor(kLook);
  }
}

}  // namespace shardmesh
