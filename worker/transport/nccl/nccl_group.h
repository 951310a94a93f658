// NcclGroup: ranks with a GPU each, in one process or in many, on one host or on many, that exchange through NCCL.
//
// Memory of this rank's device is used where it lies, where all ranks give such memory; everything else goes through
// staging on the device, a part at a time. What lies on the device is complete before a call: the group has a stream of
// its own. Every call begins with a small all-gather of its header, which is also the barrier.
//
// Best is memory that Allocate gave: where the ranks' machines have such (NVLink, or a bus on which GPUs read each
// other's memory), it is a symmetric window, which NCCL's all-gather writes on the peers without a copy in between.
//
// Exact mode: NCCL moves bytes; slots' pieces go straight to their owners, which add them in tree order: on the device
// where this build has CUDA, else on the host. Fast mode: NCCL adds (ncclReduceScatter), in the slots' own format and
// in an order of its own, which depends on the ranks, the size and the library: results are NOT the exact mode's, and
// may differ from run to run. It is part of a job's specification, and the same on all ranks.
//
// The communicator is non-blocking, so every wait for NCCL or the device has the call's time limit; the time that a
// function of either library takes to return is theirs. What a transport that hangs does not tell, ranks tell each
// other through a rendezvous (group_signs.h). When the group ends, the call that is under way aborts the communicator,
// or the next one, or the destructor. A call that failed waits up to 10 seconds beyond its time limit for the group's
// stream to be empty, because copies of the caller's memory may be under way; where the stream is still busy then, the
// device may use that memory after the return.
//
// Errors are group.h's; Unavailable is also: NCCL or the device failed, its words are in the message.
// ResourceExhausted: the staging is too small for so many slots and ranks (on all ranks; the group is over).
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "local/device/device_runtime.h"
#include "worker/transport/group.h"
#include "worker/transport/group_signs.h"
#include "worker/transport/nccl/nccl_library.h"

namespace shardmesh {

// SlotSumCuda of kernels/sum/slot_sum_cuda.h, which has the contract.
using DeviceSum = const char* (*)(Format format, const void* slots, int num_slots, int64_t elements, float* sum,
                                  void* stream);

class NcclGroup final : public Group {
 public:
  // The kernel of this build; null where it has no CUDA.
  static DeviceSum BuiltDeviceSum();

  struct Options {
    int rank = 0, size = 1;
    uint64_t epoch = 0;
    // In the rendezvous: the same for all ranks, and never used before. The rendezvous outlives the group.
    std::string name;
    SetKey set;
    GetKey get;
    // The rest is the same on all ranks, or calls fail.
    bool fast = false;
    int64_t staging_bytes = 64 << 20;  // of device memory
    DeviceSum sum = BuiltDeviceSum();  // null: on the host
  };

  // Returns when all ranks have joined. Of several ranks in a process, each joins in a thread of its own.
  //   InvalidArgument: an option is wrong. ResourceExhausted: the device has no room for the staging.
  //   Unavailable: a rank did not join in time (it is named), or NCCL or the device failed. Aborted: another rank gave
  //   up.
  static absl::StatusOr<std::unique_ptr<NcclGroup>> Join(const NcclLibrary& nccl, std::unique_ptr<DeviceRuntime> device,
                                                         Options options, absl::Duration timeout);
  // Waits for what the device still does, at most 10 seconds; then it gives its memory up.
  ~NcclGroup() override;

  // Memory of this rank's device for what calls move, at a multiple of 4096; every rank calls it, with the same
  // `bytes`. It lives as long as the group, and calls find it in place. Errors as of every call; also
  // ResourceExhausted, on all ranks: one of them has not so much memory (the group goes on).
  absl::StatusOr<char*> Allocate(int64_t bytes, absl::Duration timeout);
  // Whether all that Allocate gave is in symmetric windows. NCCL makes none where it has no use for them.
  bool windows() const;

  absl::string_view name() const override { return options_.fast ? "nccl-fast" : "nccl"; }
  void Abort(absl::string_view reason) override { signs_.End(reason); }

 protected:
  absl::Status DoBarrier(const CallHeader& header, absl::Duration timeout) override;
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) override;
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) override;
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) override;
  absl::Status DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                               absl::Duration timeout) override;

 private:
  // A call under way, and how far it is.
  struct Call {
    CallHeader header;
    absl::Duration timeout;
    int64_t until_nanos;
    bool agreed = false;  // all ranks have come to it

    uint64_t point() const { return 2 * header.number + (agreed ? 1 : 0); }
  };
  // What a rank shows its peers at the beginning of a call.
  struct Ticket {
    CallHeader header;
    int64_t staging_bytes = 0;
    uint32_t fast = 0;
    uint32_t in_place = 0;
  };
  // For, or from, a peer.
  struct Parcel {
    char* memory;
    int peer;
  };
  // What Allocate gave.
  struct Block {
    void* memory = nullptr;
    NcclWindow* window = nullptr;  // null: NCCL has none for it
  };
  // How a reduction is cut: parts of so many elements, of each of so many arrays that are sent and received.
  struct Cut {
    int64_t part = 0, sent = 0, received = 0;
  };

  NcclGroup(const NcclLibrary& nccl, std::unique_ptr<DeviceRuntime> device, Options options);

  absl::Status Connect(Call& call);
  void Leave();
  void FreeBlocks();
  // Waits until nothing is in the stream; false: something still is at `until`.
  bool Drain(int64_t until);
  void AbortCommunicator();
  absl::Status End(const absl::Status& status);
  // Makes a call: body(call), whose error ends the group.
  absl::Status Make(const CallHeader& header, absl::Duration timeout, absl::FunctionRef<absl::Status(Call&)> body);

  // All ranks meet and compare their calls; whether all of them have the memory in place.
  absl::StatusOr<bool> Agree(Call& call, bool in_place);
  absl::Status CheckTicket(const Ticket& mine, const Ticket& theirs, int peer) const;

  // Returns when what was given to NCCL and to the stream is done.
  absl::Status Await(const Call& call);
  absl::Status Late(const Call& call) const;
  absl::Status Failed(const Call& call, NcclResult result) const;
  // Awaits what a function of NCCL began.
  absl::Status Run(const Call& call, NcclResult result);
  absl::Status ToHost(const Call& call, void* to, const char* from, int64_t bytes);
  // Sends and receives `bytes` each, together.
  absl::Status Exchange(const Call& call, const std::vector<Parcel>& sent, const std::vector<Parcel>& received,
                        int64_t bytes);

  absl::StatusOr<Cut> CutOf(const SlotSum& sum, int64_t most_held, bool in_place) const;
  absl::Status SendSlots(const Call& call, const SlotSum& sum, const Cut& cut, int64_t begin, int64_t some,
                         bool in_place);
  absl::Status SumByNccl(const Call& call, const SlotSum& sum, const Cut& cut, int64_t begin, int64_t some);
  absl::Status SumParts(const Call& call, Format format, const Cut& cut, int64_t some, float* piece);

  const NcclApi nccl_;
  const Options options_;
  std::unique_ptr<DeviceRuntime> device_;
  GroupSigns signs_;
  NcclComm* comm_ = nullptr;  // null: not yet, or aborted
  char* staging_ = nullptr;   // and after it, the tickets
  std::deque<Block> blocks_;  // stay where they are: NCCL writes the windows late
  std::vector<char> host_;
};

}  // namespace shardmesh
