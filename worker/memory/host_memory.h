// HostMemory: the segments that all workers of one host share for one job, created by the lead (rank 0):
//   control        the words of the step protocol (control_block.h)
//   window         the gathered weights that trainers map, one for the host
//   publications   whole versions for readers, JobSpec::publications of them: pages that no version was written to yet
//                  take no memory
//   board          which versions there are, for readers that map publications (local/memory/version_board.h)
//   slots          the gradient windows of each writer (JobSpec::num_writers), one of a slot, two of a trainer that
//                  pulls slots, and behind them the mailbox of the trainer that has them
//   notifier       the word that the lead waits on: trainers map it too, to wake the lead
// Of a job on a CUDA device, window, publications and slots lie in its memory (device_windows.h); the segments of the
// host by these names have no data then, but the mailboxes.
// Every stream starts at its own multiple of 64 KiB + 4 KiB (segment.h). Movable. The mappings live as long as the
// object.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "local/memory/mailbox.h"
#include "local/memory/version_board.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "worker/control/control_block.h"
#include "worker/memory/device_windows.h"
#include "worker/memory/memory.h"

namespace shardmesh {

// How many of the kinds of segments that a job may have several of.
struct HostShape {
  HostShape(int writers, int publications = kDefaultPublications)  // NOLINT: the number of writers alone
      : num_writers(writers), num_publications(publications) {}
  HostShape(const JobSpec& job) : HostShape(job.num_writers(), job.publications) {  // NOLINT: a view of the job
    copies = job.copies;
  }
  int num_writers, num_publications, copies = 1;
};

class HostMemory {
 public:
  HostMemory(HostMemory&&) = default;
  HostMemory& operator=(HostMemory&&) = default;
  ~HostMemory();

  // Bytes of the segments of each kind; the notifier and the board are counted with the control block.
  struct Sizes {
    int64_t control = 0, window = 0, publications = 0, slots = 0;
  };
  // What Create asks for.
  static Sizes SizesOf(const Plan& plan, HostShape shape);

  // The lead's side. ResourceExhausted: not enough memory, or more ranks than kMaxHostRanks.
  // `device`: in whose memory windows lie; null: the host's. Errors of DeviceSegment::Create.
  static absl::StatusOr<HostMemory> Create(Memory& memory, const std::string& job, HostShape shape, const Plan& plan,
                                           std::shared_ptr<DeviceRuntime> device = nullptr);

  // A peer's side: the descriptors and sizes that the lead sent. InvalidArgument: they do not fit the plan.
  // FailedPrecondition: the lead's windows lie in memory of a device and there is no `device`, or the other way round.
  static absl::StatusOr<HostMemory> Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors,
                                        HostShape shape, const Plan& plan,
                                        std::shared_ptr<DeviceRuntime> device = nullptr);

  // What a peer maps: descriptors (borrowed) and their sizes, in the order of local.proto.
  std::vector<int> PeerDescriptors() const;
  void DescribeTo(v1::LocalWelcome& welcome) const;

  ControlBlock* control() const { return reinterpret_cast<ControlBlock*>(control_.data()); }
  const Segment& window() const { return window_; }
  int num_publications() const { return static_cast<int>(publications_.size()); }
  const Segment& publication(int buffer) const { return publications_[buffer]; }
  VersionBoard& board() const { return *reinterpret_cast<VersionBoard*>(board_.data()); }
  const Segment& board_segment() const { return board_; }
  const Segment& slot(int slot) const { return slots_[slot]; }
  // Of a job whose slots are pulled: a trainer's windows.
  const char* window_of(int trainer, int window) const { return slots_[trainer].data() + window * one_window_bytes_; }
  Mailbox& mailbox(int writer) const { return MailboxAt(slots_[writer].data() + gradient_window_bytes_); }
  const Segment& notifier_segment() const { return notifier_; }
  // Null: windows lie in memory of the host.
  const DeviceWindows* device() const { return device_.has_value() ? &*device_ : nullptr; }
  std::atomic<uint32_t>& notifier() const { return *reinterpret_cast<std::atomic<uint32_t>*>(notifier_.data()); }

  // No new writer of the window, the publications and the board: called by the lead when all peers have mapped them.
  // With bucket residency the window is not sealed, since pages of sealed memory cannot be given back, but made
  // read-only (Segment::RefuseNewWriters); as is all that is `retained` for members' next incarnations, which will
  // write it.
  absl::Status Seal(bool retained = false);

  // What there is of each kind, and what the kernel holds of that now: of windows on a device, all. Nothing of control.
  Sizes Allocated() const;
  Sizes Resident() const;

  // Work on the device does not end: what it may touch stays mapped until the process ends, beyond this object.
  void KeepForDevice() { retained_for_device_ = true; }

 private:
  HostMemory() = default;
  std::vector<const Segment*> All() const;
  std::vector<const DeviceSegment*> AllOnDevice() const;
  absl::Status PinControl(const Plan& plan);
  static absl::Status MapOnDevice(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors, HostShape shape,
                                  const Plan& plan, DeviceWindows& windows);

  bool bucketed_ = false;
  Segment control_, window_, notifier_, board_;
  int64_t gradient_window_bytes_ = 0, one_window_bytes_ = 0;  // of a writer; of one window
  std::vector<Segment> publications_, slots_;
  std::optional<DeviceWindows> device_;
  bool retained_for_device_ = false;
};

}  // namespace shardmesh
