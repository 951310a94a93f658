#include "worker/transport/testing/nccl_stand_in.h"

#include <type_traits>

#include "worker/transport/testing/stand_in_nccl.h"

namespace shardmesh {

std::unique_ptr<StandInFault> StandInNccl::TakeFault(const std::string& name, int rank) {
  for (auto each = planned_.begin(); each != planned_.end(); ++each) {
    if (each->name != name || each->rank != rank || --each->left > 0) continue;
    auto taken = std::make_unique<StandInFault>(*each);
    planned_.erase(each);
    return taken;
  }
  return nullptr;
}

NcclResult StandInNccl::Init(NcclComm** comm, int ranks, const NcclUniqueId& id, int rank, const NcclConfig& config) {
  MutexLock lock(machine_.mu);
  comms_.push_back(std::make_unique<NcclComm>());
  NcclComm& made = *comms_.back();
  made.number = static_cast<int>(comms_.size());
  made.rank = rank;
  made.device = StandInMachine::CurrentDevice();
  Note("CommInitRankConfig", &made);
  if (made.device < 0) return Misuse("CommInitRankConfig without a current device");
  if (config.magic != 0xcafebeef || config.size < sizeof(NcclConfig) || config.blocking != 0) {
    return Misuse("CommInitRankConfig of a blocking communicator, or with a wrong configuration");
  }
  const auto fault = TakeFault("CommInitRankConfig", rank);
  if (fault && fault->fault == Fault::kFail) return fault->result;
  made.stuck = fault && fault->fault == Fault::kHang;
  if (fault && fault->fault == Fault::kAsyncError) made.state = fault->result;
  StandInClique& clique = cliques_[std::string(id.internal, sizeof(id.internal))];
  clique.ranks.resize(ranks);
  clique.ranks[rank] = &made;
  made.clique = &clique;
  *comm = &made;
  return kNcclInProgress;
}

NcclResult StandInNccl::Finalize(NcclComm* comm) {
  MutexLock lock(machine_.mu);
  Note("CommFinalize", comm);
  if (comm->gone || comm->finalized || comm->state != kNcclSuccess) return Misuse("CommFinalize at a wrong time");
  if (comm->windows > 0) return Misuse("CommFinalize of a communicator with windows");
  const auto fault = TakeFault("CommFinalize", comm->rank);
  if (fault && fault->fault == Fault::kFail) return fault->result;
  comm->stuck = fault && fault->fault == Fault::kHang;
  comm->finalized = true;
  comm->state = kNcclInProgress;
  return kNcclInProgress;
}

NcclResult StandInNccl::Remove(NcclComm* comm, const char* name) {
  MutexLock lock(machine_.mu);
  Note(name, comm);
  const bool destroy = std::string(name) == "CommDestroy";
  if (comm->gone) return Misuse(std::string(name) + " of a communicator that was ended");
  if (destroy && (!comm->finalized || comm->state != kNcclSuccess)) return Misuse("CommDestroy before its end");
  comm->gone = true;
  if (comm->running) comm->running->done = true;  // what runs is stopped
  comm->given.reset();
  return destroy ? kNcclSuccess : kNcclInProgress;
}

NcclResult StandInNccl::State(NcclComm* comm, NcclResult* state) {
  MutexLock lock(machine_.mu);
  if (comm->gone) return Misuse("CommGetAsyncError of a communicator that was ended");
  *state = comm->state;
  if (comm->state != kNcclInProgress || comm->stuck || !comm->clique->whole()) return kNcclSuccess;
  if (comm->window_to != nullptr && !EndRegistration(*comm)) return kNcclSuccess;
  // Whoever asks again finds it done.
  comm->state = kNcclSuccess;
  if (comm->given) {
    comm->running = comm->given;
    comm->given_to->tasks.push_back(std::move(comm->given));
  }
  return kNcclSuccess;
}

NcclResult StandInNccl::Give(NcclComm* comm, void* stream, StandInOp op) {
  {
    MutexLock lock(machine_.mu);
    const std::string name = op.name;
    Note(name.c_str(), comm, op);
    if (comm->gone || comm->state == kNcclInProgress) return Misuse(name + " on a communicator that is not ready");
    if (comm->state != kNcclSuccess) return comm->state;
    if (StandInMachine::CurrentDevice() != comm->device) return Misuse(name + " with another device");
    const size_t all = op.bytes() * comm->clique->ranks.size();
    const bool gather = name == "AllGather", reduce = name == "ReduceScatter";
    if ((op.from && !machine_.IsDeviceLocked(op.from, reduce ? all : op.bytes(), comm->device)) ||
        (op.to && !machine_.IsDeviceLocked(op.to, gather ? all : op.bytes(), comm->device))) {
      return Misuse(name + " of memory that is not the device's");
    }
    if (const auto fault = TakeFault(name, comm->rank)) {
      if (fault->fault == Fault::kFail) return fault->result;
      op.stuck = true;
      if (fault->fault == Fault::kAsyncError) comm->state = fault->result;
    }
  }
  NcclResult result = Start();
  Mine().stream = static_cast<StandInStream*>(stream);
  Mine().ops.emplace_back(comm, std::move(op));
  const NcclResult ended = Finish();
  return result == kNcclSuccess ? ended : result;
}

NcclResult StandInNccl::Start() {
  MutexLock lock(machine_.mu);
  Grouped& mine = Mine();
  if (mine.depth++ == 0) mine.number = ++groups_;
  return kNcclSuccess;
}

NcclResult StandInNccl::Finish() {
  MutexLock lock(machine_.mu);
  Grouped& mine = Mine();
  if (mine.depth == 0) return Misuse("GroupEnd without GroupStart");
  if (--mine.depth > 0 || mine.ops.empty()) return kNcclSuccess;
  NcclComm* comm = mine.ops.front().first;
  auto launch = std::make_shared<StandInLaunch>();
  for (auto& [of, op] : std::exchange(mine.ops, {})) {
    if (of != comm) return Misuse("a group of calls on several communicators");
    launch->ops.push_back(std::move(op));
  }
  comm->given = std::move(launch);
  comm->given_to = mine.stream;
  if (comm->state == kNcclSuccess) comm->state = kNcclInProgress;
  return kNcclInProgress;
}

}  // namespace shardmesh

using shardmesh::NcclComm;
using shardmesh::NcclConfig;
using shardmesh::NcclRedOp;
using shardmesh::NcclResult;
using shardmesh::NcclType;
using shardmesh::NcclUniqueId;
using shardmesh::NcclWindow;
using shardmesh::StandInNccl;

extern "C" {

shardmesh::StandIn* ShardmeshStandIn() { return &StandInNccl::Get(); }

NcclResult ncclGetVersion(int* version) {
  *version = StandInNccl::Get().version();
  return shardmesh::kNcclSuccess;
}
NcclResult ncclGetUniqueId(NcclUniqueId* id) { return StandInNccl::Get().MakeId(id); }
NcclResult ncclCommInitRankConfig(NcclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
  return StandInNccl::Get().Init(comm, ranks, id, rank, *config);
}
NcclResult ncclCommFinalize(NcclComm* comm) { return StandInNccl::Get().Finalize(comm); }
NcclResult ncclCommDestroy(NcclComm* comm) { return StandInNccl::Get().Remove(comm, "CommDestroy"); }
NcclResult ncclCommAbort(NcclComm* comm) { return StandInNccl::Get().Remove(comm, "CommAbort"); }
NcclResult ncclCommGetAsyncError(NcclComm* comm, NcclResult* error) { return StandInNccl::Get().State(comm, error); }
const char* ncclGetErrorString(NcclResult result) {
  return result == shardmesh::kNcclRemoteError ? "remote process exited or there was a network error"
                                               : "an error of the stand-in";
}
const char* ncclGetLastError(NcclComm*) { return "the stand-in was told to"; }

NcclResult ncclAllGather(const void* from, void* to, size_t sent, NcclType type, NcclComm* comm, void* stream) {
  return StandInNccl::Get().Give(comm, stream,
                                 {"AllGather", static_cast<const char*>(from), static_cast<char*>(to), sent, type});
}
NcclResult ncclReduceScatter(const void* from, void* to, size_t received, NcclType type, NcclRedOp, NcclComm* comm,
                             void* stream) {
  return StandInNccl::Get().Give(
      comm, stream, {"ReduceScatter", static_cast<const char*>(from), static_cast<char*>(to), received, type});
}
NcclResult ncclBroadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclComm* comm,
                         void* stream) {
  return StandInNccl::Get().Give(
      comm, stream, {"Broadcast", static_cast<const char*>(from), static_cast<char*>(to), count, type, root});
}
NcclResult ncclSend(const void* from, size_t count, NcclType type, int peer, NcclComm* comm, void* stream) {
  return StandInNccl::Get().Give(comm, stream, {"Send", static_cast<const char*>(from), nullptr, count, type, peer});
}
NcclResult ncclRecv(void* to, size_t count, NcclType type, int peer, NcclComm* comm, void* stream) {
  return StandInNccl::Get().Give(comm, stream, {"Recv", nullptr, static_cast<char*>(to), count, type, peer});
}
NcclResult ncclMemAlloc(void** memory, size_t bytes) { return StandInNccl::Get().Allocate(memory, bytes); }
NcclResult ncclMemFree(void* memory) { return StandInNccl::Get().Free(memory); }
NcclResult ncclCommWindowRegister(NcclComm* comm, void* memory, size_t bytes, NcclWindow** window, int flags) {
  return StandInNccl::Get().Register(comm, memory, bytes, window, flags);
}
NcclResult ncclCommWindowDeregister(NcclComm* comm, NcclWindow* window) {
  return StandInNccl::Get().Deregister(comm, window);
}
NcclResult ncclGroupStart() { return StandInNccl::Get().Start(); }
NcclResult ncclGroupEnd() { return StandInNccl::Get().Finish(); }

}  // extern "C"

// The stand-in is of the types that the loader expects.
#define SHARDMESH_SAME(name) static_assert(std::is_same_v<decltype(&nccl##name), decltype(shardmesh::NcclApi::name)>);
SHARDMESH_NCCL_FUNCTIONS(SHARDMESH_SAME)
#undef SHARDMESH_SAME
