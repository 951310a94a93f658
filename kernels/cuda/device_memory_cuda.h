// Device memory with plain types, so that g++ needs no CUDA header. Only in builds with --config=cuda.
// Thread-safe; the calling thread's current device is used. Functions that return text return null on success, else the
// CUDA runtime's description of the error (static storage).
#pragma once

#include <cstdint>

namespace shardmesh {

// Null when a driver answers and there is a device.
const char* CudaDeviceError();

// A block of device memory, freed with its owner. data() is null when there was not enough.
class DeviceBlock {
 public:
  explicit DeviceBlock(int64_t num_bytes);
  ~DeviceBlock();
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;

  uint8_t* data() const { return data_; }
  // Copy `num_bytes` of the block, from its beginning or from `offset`, after all work given to the device before.
  // REQUIRES: data() is not null.
  const char* CopyFromHost(const void* from, int64_t num_bytes);
  const char* CopyToHost(void* to, int64_t num_bytes, int64_t offset = 0) const;

 private:
  uint8_t* data_ = nullptr;
};

}  // namespace shardmesh
