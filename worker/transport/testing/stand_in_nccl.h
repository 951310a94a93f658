// The communicators of the stand-in (nccl_stand_in.h). One mutex, the machine's, guards everything.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/transport/testing/nccl_stand_in.h"
#include "worker/transport/testing/stand_in_device.h"

namespace shardmesh {

struct StandInOp {
  std::string name;
  const char* from = nullptr;
  char* to = nullptr;
  size_t count = 0;
  NcclType type = kNcclInt8;
  int peer = -1;  // or the root
  bool done = false, stuck = false;

  size_t bytes() const { return count * (type == kNcclFloat32 ? 4 : type == kNcclBfloat16 ? 2 : 1); }
  bool collective() const { return name != "Send" && name != "Recv"; }
  bool Fits(const StandInOp& other) const {
    return name == other.name && count == other.count && type == other.type && peer == other.peer;
  }
};

// Operations that run together.
struct StandInLaunch final : StandInTask {
  std::vector<StandInOp> ops;
};

struct StandInClique;

struct NcclComm {
  int number = 0, rank = 0, device = 0;
  StandInClique* clique = nullptr;
  NcclResult state = kNcclInProgress;
  bool stuck = false, finalized = false, gone = false;
  std::shared_ptr<StandInLaunch> given;  // not in the stream yet
  StandInStream* given_to = nullptr;
  std::shared_ptr<StandInLaunch> running;  // in the stream
  std::vector<size_t> registered;          // bytes of each registration, of all so far
  NcclWindow** window_to = nullptr;        // of one under way
  int windows = 0;                         // that it has
};

struct NcclWindow {
  NcclComm* comm;
  const void* memory;
};

struct StandInClique {
  std::vector<NcclComm*> ranks;

  bool whole() const {
    return std::none_of(ranks.begin(), ranks.end(), [](const auto* each) { return !each; });
  }
};

struct StandInFault {
  std::string name;
  int rank, left;
  StandIn::Fault fault;
  NcclResult result;
};

class StandInNccl final : public StandIn {
 public:
  static StandInNccl& Get() {
    static auto* nccl = new StandInNccl;
    return *nccl;
  }

  StandInNccl() {
    MutexLock lock(machine_.mu);
    machine_.progress = [this] { return Progress(); };
  }

  void Reset() override {
    MutexLock lock(machine_.mu);
    version_ = 22809;
    calls_.clear();
    planned_.clear();
    machine_.misuses.clear();
    machine_.memory = Memory::kAllocated;
    windows_ = true;
    memory_left_.clear();
    machine_.lost.clear();
    machine_.guarded = false;
    machine_.ProtectLocked();
    machine_.has_virtual = true;
    machine_.virtual_left = int64_t{1} << 34;
  }
  void SetVersion(int version) override {
    MutexLock lock(machine_.mu);
    version_ = version;
  }
  void SetMemory(Memory memory) override {
    MutexLock lock(machine_.mu);
    machine_.memory = memory;
  }
  void SetWindows(bool windows) override {
    MutexLock lock(machine_.mu);
    windows_ = windows;
  }
  void SetMemoryOf(int device, size_t bytes) override {
    MutexLock lock(machine_.mu);
    memory_left_[device] = bytes;
  }
  void Plan(const std::string& name, int rank, int nth, Fault fault, NcclResult result) override {
    MutexLock lock(machine_.mu);
    planned_.push_back({name, rank, nth, fault, result});
  }
  std::vector<StandInCall> Calls(int rank) const override {
    MutexLock lock(machine_.mu);
    std::vector<StandInCall> calls;
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(calls),
                 [&](const StandInCall& call) { return call.rank == rank; });
    return calls;
  }
  std::vector<std::string> Misuses() const override {
    MutexLock lock(machine_.mu);
    return machine_.misuses;
  }
  int64_t Allocations() const override {
    MutexLock lock(machine_.mu);
    return static_cast<int64_t>(machine_.blocks.size() + machine_.handles.size() + machine_.reserved.size() +
                                machine_.registered.size());
  }
  void Launch(void* stream, std::function<void()> work) override {
    MutexLock lock(machine_.mu);
    auto task = std::make_shared<StandInTask>();
    task->work = std::move(work);
    static_cast<StandInStream*>(stream)->tasks.push_back(std::move(task));
  }
  void JoinKernels() override {
    std::vector<std::thread> threads;
    {
      MutexLock lock(machine_.mu);
      for (const auto& stream : machine_.streams) {
        std::move(stream->threads.begin(), stream->threads.end(), std::back_inserter(threads));
        stream->threads.clear();
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
  void SetVirtualMemory(int64_t bytes) override {
    MutexLock lock(machine_.mu);
    machine_.has_virtual = bytes >= 0;
    machine_.virtual_left = bytes;
  }
  void GuardMemory() override {
    MutexLock lock(machine_.mu);
    machine_.guarded = true;
    machine_.ProtectLocked();
  }
  void LoseDevice(int device) override {
    MutexLock lock(machine_.mu);
    machine_.lost.insert(device);
  }

  int version() const {
    MutexLock lock(machine_.mu);
    return version_;
  }
  NcclResult MakeId(NcclUniqueId* id) {
    MutexLock lock(machine_.mu);
    Note("GetUniqueId", nullptr);
    std::memset(id, 0, sizeof(*id));
    const int number = ++ids_;
    std::memcpy(id, &number, sizeof(number));
    return kNcclSuccess;
  }
  NcclResult Init(NcclComm** comm, int ranks, const NcclUniqueId& id, int rank, const NcclConfig& config);
  NcclResult Finalize(NcclComm* comm);
  NcclResult Remove(NcclComm* comm, const char* name);
  NcclResult State(NcclComm* comm, NcclResult* state);
  NcclResult Give(NcclComm* comm, void* stream, StandInOp op);
  NcclResult Start();
  NcclResult Finish();
  // nccl_stand_in_windows.cc
  NcclResult Allocate(void** memory, size_t bytes);
  NcclResult Free(void* memory);
  NcclResult Register(NcclComm* comm, void* memory, size_t bytes, NcclWindow** window, int flags);
  NcclResult Deregister(NcclComm* comm, NcclWindow* window);

 private:
  struct Grouped {
    int depth = 0, number = 0;
    std::vector<std::pair<NcclComm*, StandInOp>> ops;
    StandInStream* stream = nullptr;
  };
  static Grouped& Mine() {
    thread_local Grouped grouped;
    return grouped;
  }

  NcclResult Misuse(const std::string& what) {
    machine_.mu.AssertHeld();
    machine_.MisuseLocked(what);
    return kNcclInvalidUsage;
  }
  void Note(const char* name, const NcclComm* comm, const StandInOp& op = {}) {
    calls_.push_back({name, comm == nullptr ? -1 : comm->rank, comm == nullptr ? 0 : comm->number, op.count,
                      static_cast<int>(op.type), op.peer, Mine().depth > 0 ? Mine().number : 0});
  }
  // The fault that is planned for this call, if there is one.
  std::unique_ptr<StandInFault> TakeFault(const std::string& name, int rank);
  // Of a registration under way: whether all ranks have come to it; gives the window then.
  bool EndRegistration(NcclComm& comm);
  bool Progress();
  bool RunCollective(StandInClique& clique);
  bool RunSends(NcclComm& comm);
  static void Perform(const std::vector<StandInOp*>& ops);
  static void Reduce(const std::vector<StandInOp*>& ops);

  StandInMachine& machine_ = StandInMachine::Get();
  int version_ = 22809, ids_ = 0, groups_ = 0;
  std::vector<StandInCall> calls_;
  std::vector<StandInFault> planned_;
  std::map<std::string, StandInClique> cliques_;
  bool windows_ = true;
  std::map<int, size_t> memory_left_;     // by device, where it is limited
  std::map<const void*, size_t> memory_;  // of Allocate, not freed
  std::vector<std::unique_ptr<NcclWindow>> open_windows_;
  std::vector<std::unique_ptr<NcclComm>> comms_;  // kept, so that a use after the end is found
};

}  // namespace shardmesh
