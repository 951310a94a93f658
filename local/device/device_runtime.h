// DeviceRuntime: one CUDA device: its memory and one stream, through the driver's library, which is loaded while the
// program runs, so that one program serves machines with and without a GPU.
//
// Waiting is the caller's: Idle() says whether everything that was given to the stream is done. Thread-compatible.
//
//   ASSIGN_OR_RETURN(auto device, DeviceRuntime::Open(0));
//   DeviceRuntime::Scope scope(*device);     // in each thread and call that uses it
//   ASSIGN_OR_RETURN(char* memory, device->Allocate(bytes));
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "local/device/cuda_driver_api.h"

namespace shardmesh {

class DeviceRuntime {
 public:
  // `library`: the file to load instead of libcuda.so.1.
  // Unavailable: no driver, no such device, or it cannot be used now; the message has the driver's words.
  // Unimplemented: the driver is too old (the function that it lacks is named).
  static absl::StatusOr<std::unique_ptr<DeviceRuntime>> Open(int device, const std::string& library = "");
  // The device of that uuid (16 bytes), whatever its number in this process. NotFound: it is not visible here.
  static absl::StatusOr<std::unique_ptr<DeviceRuntime>> OpenUuid(const std::string& uuid,
                                                                 const std::string& library = "");
  // REQUIRES: the stream is idle, and what was allocated is freed.
  ~DeviceRuntime();
  DeviceRuntime(const DeviceRuntime&) = delete;
  DeviceRuntime& operator=(const DeviceRuntime&) = delete;

  // Makes the device the calling thread's while it lives; then the thread's own one is back. Everything below, and
  // every call of NCCL, needs one.
  class Scope {
   public:
    explicit Scope(const DeviceRuntime& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const DeviceRuntime& device_;
  };

  int device() const { return device_; }
  void* stream() const { return stream_; }           // a cudaStream_t
  const std::string& name() const { return name_; }  // what the driver calls it
  const std::string& uuid() const { return uuid_; }  // 16 bytes, of the device itself
  const std::string& library() const { return library_; }
  const CudaDriverApi& api() const { return api_; }
  int handle() const { return handle_; }  // a CUdevice

  // Device memory, at a multiple of 256. ResourceExhausted: there is not so much.
  absl::StatusOr<char*> Allocate(int64_t bytes);
  void Free(char* memory);  // null is nothing

  // Whether `memory` is this device's own: it can be used where it lies.
  bool Owns(const void* memory) const;

  // Copies in the stream, between any memory of the device and of the host. Unavailable: the device failed.
  // REQUIRES: for memory of the host: the stream has nothing but copies to do (the driver may wait for it, without a
  // time limit).
  absl::Status Copy(void* to, const void* from, int64_t bytes);

  // Whether everything that was given to the stream is done. Unavailable: the device failed.
  absl::StatusOr<bool> Idle() const;
  // Waits for that. DeadlineExceeded: `timeout` passed.
  absl::Status AwaitIdle(absl::Duration timeout) const;

  // What a function of the driver refused, as a status: ResourceExhausted where there is not enough memory,
  // Unimplemented where it cannot do such a thing, else Unavailable.
  absl::Status Failed(absl::string_view what, int error) const;

 private:
  DeviceRuntime(const CudaDriverApi& api, int device) : api_(api), device_(device) {}

  const CudaDriverApi api_;
  const int device_;
  int handle_ = 0;  // a CUdevice
  std::string name_, uuid_, library_;
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace shardmesh
