// The part of NCCL's C interface that is used here, so that neither its header nor the library is needed to build.
// Taken from nccl.h of NCCL 2.28.9 (https://github.com/NVIDIA/nccl, tag v2.28.9-1, src/nccl.h.in; BSD licence): values
// and layouts are part of the library's binary interface. A function's name in the library begins with "nccl".
#pragma once

#include <climits>
#include <cstddef>

namespace shardmesh {

inline constexpr int kOldestNccl = 22800;  // as ncclGetVersion counts: 10000 major + 100 minor + patch

struct NcclComm;
struct NcclWindow;
struct NcclUniqueId {
  char internal[128];
};

enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
};
enum NcclType : int { kNcclInt8 = 0, kNcclFloat32 = 7, kNcclBfloat16 = 9 };
enum NcclRedOp : int { kNcclSum = 0 };
inline constexpr int kNcclWindowSymmetric = 1;        // NCCL_WIN_COLL_SYMMETRIC
inline constexpr size_t kNcclWindowAlignment = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT

// The first attributes of ncclConfig_t, as of 2.14: the library reads as many as `size` says, and takes its defaults
// for the others.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = INT_MIN;  // undefined
};

struct NcclApi {
  NcclResult (*GetVersion)(int* version);
  NcclResult (*GetUniqueId)(NcclUniqueId* id);
  NcclResult (*CommInitRankConfig)(NcclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config);
  NcclResult (*CommFinalize)(NcclComm* comm);
  NcclResult (*CommDestroy)(NcclComm* comm);
  NcclResult (*CommAbort)(NcclComm* comm);
  NcclResult (*CommGetAsyncError)(NcclComm* comm, NcclResult* error);
  const char* (*GetErrorString)(NcclResult result);
  const char* (*GetLastError)(NcclComm* comm);
  NcclResult (*AllGather)(const void* from, void* to, size_t sent, NcclType type, NcclComm* comm, void* stream);
  NcclResult (*ReduceScatter)(const void* from, void* to, size_t received, NcclType type, NcclRedOp op, NcclComm* comm,
                              void* stream);
  NcclResult (*Broadcast)(const void* from, void* to, size_t count, NcclType type, int root, NcclComm* comm,
                          void* stream);
  NcclResult (*Send)(const void* from, size_t count, NcclType type, int peer, NcclComm* comm, void* stream);
  NcclResult (*Recv)(void* to, size_t count, NcclType type, int peer, NcclComm* comm, void* stream);
  NcclResult (*MemAlloc)(void** memory, size_t bytes);
  NcclResult (*MemFree)(void* memory);
  NcclResult (*CommWindowRegister)(NcclComm* comm, void* memory, size_t bytes, NcclWindow** window, int flags);
  NcclResult (*CommWindowDeregister)(NcclComm* comm, NcclWindow* window);
  NcclResult (*GroupStart)();
  NcclResult (*GroupEnd)();
};

// Calls f(name) for each, GetVersion first.
#define SHARDMESH_NCCL_FUNCTIONS(f)                                                                                   \
  f(GetVersion) f(GetUniqueId) f(CommInitRankConfig) f(CommFinalize) f(CommDestroy) f(CommAbort) f(CommGetAsyncError) \
      f(GetErrorString) f(GetLastError) f(AllGather) f(ReduceScatter) f(Broadcast) f(Send) f(Recv) f(MemAlloc)        \
          f(MemFree) f(CommWindowRegister) f(CommWindowDeregister) f(GroupStart) f(GroupEnd)

}  // namespace shardmesh
