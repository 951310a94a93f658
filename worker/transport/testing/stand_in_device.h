// The devices of the stand-in (nccl_stand_in.h): memory, and streams of tasks that are done when somebody asks.
// Everything is guarded by one mutex; what ends in Locked needs it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/base/sync.h"
#include "local/device/cuda_driver_api.h"
#include "worker/transport/testing/nccl_stand_in.h"

namespace shardmesh {

inline constexpr int kStandInDevices = 16;

// What a stream has to do: `copy`, or `work` on a thread of its own, or, where both are null, what others set done.
struct StandInTask {
  std::function<void()> copy, work;
  bool started = false, done = false;
};

struct StandInStream {
  int device = 0;
  std::deque<std::shared_ptr<StandInTask>> tasks;
  std::vector<std::thread> threads;  // of its kernels
};

inline constexpr int kStandInLost = 719;  // CUDA_ERROR_LAUNCH_FAILED
inline constexpr size_t kStandInGranularity = size_t{64} << 10;

class StandInMachine {
 public:
  static StandInMachine& Get();
  static int CurrentDevice();  // of the calling thread; -1: none

  // Does what can be done in all streams; `progress` moves what others set done, and says whether it did.
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool IsDeviceLocked(const void* memory, size_t bytes, int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Memory of the host that copies need not wait for.
  bool IsRegisteredLocked(const void* memory, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool IsLost(int device) const {
    MutexLock lock(mu);
    return lost.count(device) > 0;
  }
  bool BusyLocked(int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void MisuseLocked(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { misuses.push_back(what); }

  mutable Mutex mu;
  std::function<bool()> progress ABSL_GUARDED_BY(mu);
  StandIn::Memory memory ABSL_GUARDED_BY(mu) = StandIn::Memory::kAllocated;
  struct Block {
    size_t bytes;
    int device;
    std::unique_ptr<char[]> data;
  };
  std::map<uintptr_t, Block> blocks ABSL_GUARDED_BY(mu);
  // Virtual memory: what is behind a handle, and which addresses are reserved.
  struct Handle {
    int fd;
    size_t bytes;
    int device;
  };
  struct Reserved {
    size_t bytes;
    std::shared_ptr<Handle> mapped;  // null: nothing
    int protection = 0;              // as cuMemSetAccess said
  };
  std::map<uint64_t, std::shared_ptr<Handle>> handles ABSL_GUARDED_BY(mu);
  std::map<uintptr_t, Reserved> reserved ABSL_GUARDED_BY(mu);
  std::map<uintptr_t, size_t> registered ABSL_GUARDED_BY(mu);  // memory of the host
  uint64_t next_handle ABSL_GUARDED_BY(mu) = 1;
  int64_t virtual_left ABSL_GUARDED_BY(mu) = int64_t{1} << 34;
  bool has_virtual ABSL_GUARDED_BY(mu) = true;
  std::set<int> lost ABSL_GUARDED_BY(mu);
  bool guarded ABSL_GUARDED_BY(mu) = false;  // virtual memory is open only while something works
  int working ABSL_GUARDED_BY(mu) = 0;
  // One more, or one less, of kernels and copies works.
  void WorkLocked(int change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void ProtectLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  std::vector<std::unique_ptr<StandInStream>> streams ABSL_GUARDED_BY(mu);
  std::vector<std::string> misuses ABSL_GUARDED_BY(mu);
};

}  // namespace shardmesh

// The stand-in's functions are of the types that the loader expects.
extern "C" {
#define SHARDMESH_DECLARE(name) std::remove_pointer_t<decltype(shardmesh::CudaDriverApi::name)> cu##name;
SHARDMESH_CUDA_DRIVER_FUNCTIONS(SHARDMESH_DECLARE)
#undef SHARDMESH_DECLARE
}
