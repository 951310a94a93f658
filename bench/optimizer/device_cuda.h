// What bench/optimizer_cuda asks of the device beside the step, with plain types: its clock, copies that measure the
// bound, and the values that streams begin with. Everything happens in the default stream of the current device. For
// one thread. Functions that return text return null on success, else the CUDA runtime's description of the error
// (static storage).
#pragma once

#include <cstdint>
#include <string>

namespace shardmesh::bench {

// "NVIDIA H100 80GB HBM3, sm_90, 79.2 GiB, driver 13.0"; empty: there is no device.
std::string DescribeDevice();

// Seconds on the device between two points of the stream.
class DeviceTimer {
 public:
  DeviceTimer();
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  // `stream`: a cudaStream_t; null: the default one.
  const char* Start(void* stream = nullptr);
  // Waits until all is done that was given to the stream since Start; the error of what was done, too.
  const char* Stop(double* seconds);
  // The two halves of Stop: ends the time here, and waits for that end.
  const char* Mark(void* stream = nullptr);
  const char* Seconds(double* seconds);

 private:
  void *start_ = nullptr, *stop_ = nullptr;  // cudaEvent_t
};

// Copy device memory: by the driver, and by a kernel that moves 16 bytes a thread at a time. REQUIRES: multiples of 16.
const char* CopyByDriver(void* to, const void* from, int64_t num_bytes);
const char* CopyByKernel(void* to, const void* from, int64_t num_bytes);

// Writes StartWeight or StartGradient of elements [first, first + n) of the list, in fp32 (`wide`) or bf16, to nearest.
enum class StartKind { kWeight, kGradient };
const char* FillStart(StartKind kind, bool wide, uint32_t first, int64_t n, void* to);
const char* FillZero(void* to, int64_t num_bytes);

}  // namespace shardmesh::bench
