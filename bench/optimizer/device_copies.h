// The physical bound of benchmarks on a GPU: copies of device memory, by the driver and by a kernel, measured in the
// same rounds as what they bound. For one thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/harness.h"
#include "bench/optimizer/device_cuda.h"
#include "kernels/cuda/device_memory_cuda.h"

namespace shardmesh::bench {

inline constexpr int kStepsInARow = 4;  // as optimizer_rivals.py takes them

// What device_cuda.h and kernels answer. Internal: the device's error.
absl::Status DeviceStatus(const char* error);

class DeviceCopies {
 public:
  // Takes 2 GiB of the device until it ends, and adds the rounds "driver" and "kernel", which call it.
  // ResourceExhausted: there is no room.
  absl::Status AddTo(Rounds& rounds);

  // Seconds of one of `times` in a row, on the device's clock: what the processor does for one lies behind the one
  // before.
  absl::StatusOr<double> SecondsOnDevice(const std::function<absl::Status()>& work, int times);

  // Round by round: as long as the faster copy would take to move so many bytes, read and written together.
  static std::vector<double> SecondsToMove(double bytes, const Rounds& rounds);
  // Both speeds, for people.
  static std::string Describe(const Rounds& rounds);

 private:
  std::unique_ptr<DeviceBlock> from_, to_;
  DeviceTimer timer_;
};

}  // namespace shardmesh::bench
