// The devices of the stand-in (nccl_stand_in.h): memory, and streams of tasks that are done when somebody asks.
// Everything is guarded by one mutex; what ends in Locked needs it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/sync.h"
#include "worker/collectives/testing/nccl_stand_in.h"

namespace shardmesh {

inline constexpr int kStandInDevices = 16;

// What a stream has to do: `copy`, or, where that is null, what others set done.
struct StandInTask {
  std::function<void()> copy;
  bool started = false, done = false;
};

struct StandInStream {
  int device = 0;
  std::deque<std::shared_ptr<StandInTask>> tasks;
};

class StandInMachine {
 public:
  static StandInMachine& Get();
  static int CurrentDevice();  // of the calling thread; -1: none

  // Does what can be done in all streams; `progress` moves what others set done, and says whether it did.
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool IsDeviceLocked(const void* memory, size_t bytes, int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
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
  std::vector<std::unique_ptr<StandInStream>> streams ABSL_GUARDED_BY(mu);
  std::vector<std::string> misuses ABSL_GUARDED_BY(mu);
};

}  // namespace shardmesh
