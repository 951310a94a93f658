// A stand-in for libnccl and libcuda, for tests without a GPU: one shared library with the functions of both that
// nccl_api.h and cuda_driver_api.h name, loaded by the same loaders. Ranks are threads of one process; host memory
// stands for device memory; bytes really move. Virtual memory of a device is a memfd, which processes really share.
//
// It is as late as the real ones may be: what is in a stream is done when somebody asks for it and not before; what a
// non-blocking communicator was given reaches the stream after it was asked for its state. And it is strict: what would
// hang, corrupt memory or be undefined on a GPU is a misuse, which tests expect to be none.
//
// Its own interface is found under the name kStandInEntry. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "worker/transport/nccl/nccl_api.h"

namespace shardmesh {

inline constexpr char kStandInEntry[] = "ShardmeshStandIn";

// A call of NCCL, as it came.
struct StandInCall {
  std::string name;  // without "nccl"
  int rank = -1;     // of the communicator; -1: it has none
  int communicator = 0;
  size_t count = 0;
  int type = -1;
  int peer = -1;  // or the root
  int group = 0;  // 0: not between GroupStart and GroupEnd, else the group's number
};

class StandIn {
 public:
  // Which memory is taken for the device's: what was allocated there; everything; everything on devices of odd number.
  enum class Memory { kAllocated, kAll, kAllOnOdd };
  // What becomes of a call: it returns the result; it begins and never ends; it begins, and the communicator's state
  // becomes the result.
  enum class Fault { kFail, kHang, kAsyncError };

  virtual ~StandIn() = default;
  // As new: no calls, no faults, no misuse, version 22809, windows, memory enough.
  virtual void Reset() = 0;
  virtual void SetVersion(int version) = 0;
  virtual void SetMemory(Memory memory) = 0;
  // Whether registered memory becomes a window, or NCCL has no use for it; and how much ncclMemAlloc has in all.
  virtual void SetWindows(bool windows) = 0;
  virtual void SetMemoryOf(int device, size_t bytes) = 0;
  // Of the `nth` call from now on of that name on that rank's communicator (1: the next).
  virtual void Plan(const std::string& name, int rank, int nth, Fault fault, NcclResult result) = 0;
  // Of one rank, in their order.
  virtual std::vector<StandInCall> Calls(int rank) const = 0;
  virtual std::vector<std::string> Misuses() const = 0;
  virtual int64_t Allocations() const = 0;  // not freed

  // A kernel: `work` is done by a thread of its own when everything before it in the stream is.
  virtual void Launch(void* stream, std::function<void()> work) = 0;
  // Waits for the kernels that have begun, in streams that nobody will destroy too, and ends their threads.
  virtual void JoinKernels() = 0;
  // Bytes that a device can give as virtual memory in this process; less than 0: its driver has none at all.
  virtual void SetVirtualMemory(int64_t bytes) = 0;
  // From now on, until Reset, virtual memory can be touched only while a kernel or a copy works: what the host does to
  // it beside them ends the process, as on a machine with a GPU.
  virtual void GuardMemory() = 0;
  // From now on, until Reset, the device answers every call with an error, and its streams stand still.
  virtual void LoseDevice(int device) = 0;
};

using StandInEntry = StandIn* (*)();

}  // namespace shardmesh
