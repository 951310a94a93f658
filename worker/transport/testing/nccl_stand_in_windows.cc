// The stand-in's symmetric windows: memory of ncclMemAlloc, which all ranks of a communicator register together.
#include <algorithm>

#include "worker/transport/testing/stand_in_nccl.h"

namespace shardmesh {

NcclResult StandInNccl::Allocate(void** memory, size_t bytes) {
  MutexLock lock(machine_.mu);
  const int device = StandInMachine::CurrentDevice();
  if (device < 0) return Misuse("MemAlloc without a current device");
  if (const auto limit = memory_left_.find(device); limit != memory_left_.end()) {
    if (bytes > limit->second) return kNcclUnhandledCudaError;
    limit->second -= bytes;
  }
  std::unique_ptr<char[]> data(new char[bytes + kNcclWindowAlignment]);
  const auto at = (reinterpret_cast<uintptr_t>(data.get()) + kNcclWindowAlignment - 1) & ~(kNcclWindowAlignment - 1);
  machine_.blocks[at] = {bytes, device, std::move(data)};
  *memory = reinterpret_cast<void*>(at);
  memory_[*memory] = bytes;
  return kNcclSuccess;
}

NcclResult StandInNccl::Free(void* memory) {
  MutexLock lock(machine_.mu);
  if (memory_.erase(memory) == 0) return Misuse("MemFree of what MemAlloc did not give");
  for (const auto& window : open_windows_) {
    if (window->memory == memory && !window->comm->gone) return Misuse("MemFree of a window");
  }
  machine_.blocks.erase(reinterpret_cast<uintptr_t>(memory));
  return kNcclSuccess;
}

NcclResult StandInNccl::Register(NcclComm* comm, void* memory, size_t bytes, NcclWindow** window, int flags) {
  MutexLock lock(machine_.mu);
  Note("CommWindowRegister", comm);
  if (comm->gone || comm->state != kNcclSuccess) return Misuse("CommWindowRegister at a wrong time");
  const auto found = memory_.find(memory);
  if (found == memory_.end() || found->second < bytes || flags != kNcclWindowSymmetric) {
    return Misuse("CommWindowRegister of memory that MemAlloc did not give, or of another kind");
  }
  if (const auto fault = TakeFault("CommWindowRegister", comm->rank)) {
    if (fault->fault == Fault::kFail) return fault->result;
    comm->stuck = fault->fault == Fault::kHang;
    comm->state = comm->stuck ? kNcclInProgress : fault->result;
    return kNcclInProgress;  // peers wait for it
  }
  *window = nullptr;
  comm->registered.push_back(bytes);
  comm->window_to = window;
  if (windows_) open_windows_.push_back(std::make_unique<NcclWindow>(NcclWindow{comm, memory}));
  comm->state = kNcclInProgress;
  return kNcclInProgress;
}

bool StandInNccl::EndRegistration(NcclComm& comm) {
  machine_.mu.AssertHeld();
  const size_t count = comm.registered.size();
  for (const NcclComm* peer : comm.clique->ranks) {
    if (peer->registered.size() < count) return false;
    if (peer->registered[count - 1] != comm.registered.back()) {
      machine_.MisuseLocked("ranks register windows of different sizes");
      return false;
    }
  }
  for (auto window = open_windows_.rbegin(); window != open_windows_.rend() && *comm.window_to == nullptr; ++window) {
    if ((*window)->comm == &comm) *comm.window_to = window->get();
  }
  if (*comm.window_to != nullptr) ++comm.windows;
  comm.window_to = nullptr;
  return true;
}

NcclResult StandInNccl::Deregister(NcclComm* comm, NcclWindow* window) {
  MutexLock lock(machine_.mu);
  Note("CommWindowDeregister", comm);
  const auto found = std::find_if(open_windows_.begin(), open_windows_.end(),
                                  [&](const auto& each) { return each.get() == window && each->comm == comm; });
  if (found == open_windows_.end() || comm->gone) return Misuse("CommWindowDeregister of no window");
  open_windows_.erase(found);
  --comm->windows;
  return kNcclSuccess;
}

}  // namespace shardmesh
