#include "local/device/device_segment.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kClearTimeout = absl::Seconds(30);

CudaAllocationProperties PropertiesOf(const DeviceRuntime& device) {
  CudaAllocationProperties properties;
  properties.location.id = device.device();
  return properties;
}

// Codes as driver 580 gives them. cuMemMap refuses every other size than the memory's with NOT_SUPPORTED, which cannot
// mean that there is no virtual memory: Round has asked before. cuMemImport says UNKNOWN of a descriptor that is none of
// CUDA's. INVALID_VALUE is what the manual names for both.
bool RefusesSize(int error) { return error == kCudaInvalidValue || error == kCudaNotSupported; }
bool RefusesDescriptor(int error) { return error == kCudaInvalidValue || error == kCudaUnknown; }

}  // namespace

absl::Status DeviceSegment::CheckSupported(const DeviceRuntime& device) {
  for (const int attribute : {kCudaHasVirtualMemory, kCudaHasFileDescriptors}) {
    int has = 0;
    const int error = device.api().DeviceGetAttribute(&has, attribute, device.handle());
    if (error != kCudaSuccess) return device.Failed("say what it can do", error);
    if (has != 0) continue;
    return absl::UnimplementedError(absl::StrCat(
        "the driver of CUDA device ", device.device(), " (", device.name(), ") has no ",
        attribute == kCudaHasVirtualMemory ? "virtual memory management" : "file descriptors of its memory",
        ", which sharing it between processes takes; run workers with --device cpu"));
  }
  return absl::OkStatus();
}

DeviceSegment& DeviceSegment::operator=(DeviceSegment&& other) noexcept {
  if (this == &other) return *this;
  Close();
  device_ = std::move(other.device_);
  fd_ = std::move(other.fd_);
  address_ = std::exchange(other.address_, 0);
  num_bytes_ = std::exchange(other.num_bytes_, 0);
  allocated_ = std::exchange(other.allocated_, 0);
  return *this;
}

// Errors of an end are nobody's: what was shared lives on with the others.
void DeviceSegment::Close() {
  if (address_ == 0) return;
  DeviceRuntime::Scope scope(*device_);
  device_->api().MemUnmap(address_, static_cast<size_t>(allocated_));
  device_->api().MemAddressFree(address_, static_cast<size_t>(allocated_));
  address_ = 0;
}

absl::Status DeviceSegment::Round() {
  RETURN_IF_ERROR(CheckSupported(*device_));
  const CudaAllocationProperties properties = PropertiesOf(*device_);
  size_t granularity = 0;
  const int error = device_->api().MemGetAllocationGranularity(&granularity, &properties, /*minimum*/ 0);
  if (error != kCudaSuccess) return device_->Failed("say its granularity", error);
  const auto step = static_cast<int64_t>(granularity);
  allocated_ = (std::max<int64_t>(num_bytes_, 1) + step - 1) / step * step;
  return absl::OkStatus();
}

absl::Status DeviceSegment::MapHandle(CudaMemoryHandle handle, Access access) {
  const CudaDriverApi& api = device_->api();
  const auto bytes = static_cast<size_t>(allocated_);
  CudaAddress address = 0;
  int error = api.MemAddressReserve(&address, bytes, 0, 0, 0);
  if (error != kCudaSuccess) return device_->Failed(absl::StrCat("reserve ", bytes, " bytes of addresses"), error);
  error = api.MemMap(address, bytes, 0, handle, 0);
  if (error != kCudaSuccess) {
    api.MemAddressFree(address, bytes);
    if (!RefusesSize(error)) return device_->Failed(absl::StrCat("map ", bytes, " bytes"), error);
    return absl::InvalidArgumentError(absl::StrCat("the memory that was sent has not the ", bytes,
                                                   " bytes that were said, on CUDA device ", device_->device()));
  }
  address_ = address;  // from here on Close undoes it
  CudaAccess allowed;
  allowed.location.id = device_->device();
  allowed.flags = access == Access::kReadOnly ? kCudaReadOnly : kCudaReadWrite;
  error = api.MemSetAccess(address, bytes, &allowed, 1);
  return error == kCudaSuccess ? absl::OkStatus() : device_->Failed(absl::StrCat("use ", bytes, " bytes"), error);
}

absl::StatusOr<DeviceSegment> DeviceSegment::Create(std::shared_ptr<DeviceRuntime> device, int64_t num_bytes) {
  DeviceSegment segment(std::move(device), num_bytes);
  const DeviceRuntime& runtime = *segment.device_;
  DeviceRuntime::Scope scope(runtime);
  RETURN_IF_ERROR(segment.Round());
  const CudaAllocationProperties properties = PropertiesOf(runtime);
  CudaMemoryHandle handle = 0;
  int error = runtime.api().MemCreate(&handle, static_cast<size_t>(segment.allocated_), &properties, 0);
  if (error != kCudaSuccess) return runtime.Failed(absl::StrCat("give ", segment.allocated_, " bytes"), error);
  int fd = -1;
  error = runtime.api().MemExportToShareableHandle(&fd, handle, kCudaFileDescriptor, 0);
  absl::Status status =
      error == kCudaSuccess ? absl::OkStatus() : runtime.Failed("export its memory as a descriptor", error);
  segment.fd_ = UniqueFd(fd);
  if (status.ok()) status = segment.MapHandle(handle, Access::kReadWrite);
  runtime.api().MemRelease(handle);  // the mapping and the descriptor keep it
  RETURN_IF_ERROR(status);
  error = runtime.api().MemsetD8Async(segment.address_, 0, static_cast<size_t>(segment.allocated_), runtime.stream());
  if (error != kCudaSuccess) return runtime.Failed("clear its memory", error);
  RETURN_IF_ERROR(runtime.AwaitIdle(kClearTimeout));
  return segment;
}

absl::StatusOr<DeviceSegment> DeviceSegment::Map(std::shared_ptr<DeviceRuntime> device, UniqueFd fd, int64_t num_bytes,
                                                 Access access) {
  DeviceSegment segment(std::move(device), num_bytes);
  const DeviceRuntime& runtime = *segment.device_;
  DeviceRuntime::Scope scope(runtime);
  RETURN_IF_ERROR(segment.Round());
  CudaMemoryHandle handle = 0;
  // The driver takes the number itself in place of a pointer.
  void* const number = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
  const int error = runtime.api().MemImportFromShareableHandle(&handle, number, kCudaFileDescriptor);
  if (RefusesDescriptor(error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("what was sent is no descriptor of CUDA memory, says device ", runtime.device(), "'s driver"));
  }
  if (error != kCudaSuccess) return runtime.Failed("import memory", error);
  const absl::Status status = segment.MapHandle(handle, access);
  runtime.api().MemRelease(handle);
  RETURN_IF_ERROR(status);
  segment.fd_ = std::move(fd);
  return segment;
}

}  // namespace shardmesh
