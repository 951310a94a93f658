// HostMemory: the segments that all workers of one host share for one job, created by the lead (rank 0):
//   control        the words of the step protocol (control_page.h)
//   window         the gathered weights that trainers map, one for the host
//   publications   whole versions for readers, kPublicationBuffers of them
//   slots          one gradient window for each slot
// Every stream starts at its own multiple of 64 KiB + 4 KiB (segment.h). Movable. The mappings live as long as the
// object.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "core/layout.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "worker/control_page.h"
#include "worker/memory.h"

namespace shardmesh {

class HostMemory {
 public:
  // Bytes of the segments of each kind.
  struct Sizes {
    int64_t control = 0, window = 0, publications = 0, slots = 0;
  };
  // What Create asks for.
  static Sizes SizesOf(const Plan& plan, int num_slots);

  // The lead's side. ResourceExhausted: not enough memory, or more ranks than kMaxHostRanks.
  static absl::StatusOr<HostMemory> Create(Memory& memory, const std::string& job, int num_slots, const Plan& plan);

  // A peer's side: the descriptors and sizes that the lead sent. InvalidArgument: they do not fit the plan.
  static absl::StatusOr<HostMemory> Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors,
                                        int num_slots, const Plan& plan);

  // What a peer maps: descriptors (borrowed) and their sizes, in the order of local.proto.
  std::vector<int> PeerDescriptors() const;
  void DescribeTo(v1::LocalWelcome& welcome) const;

  ControlPage* control() const { return reinterpret_cast<ControlPage*>(control_.data()); }
  const Segment& window() const { return window_; }
  const Segment& publication(int buffer) const { return publications_[buffer]; }
  const Segment& slot(int slot) const { return slots_[slot]; }

  // No new writer of the window and the publications: called by the lead when all peers have mapped them.
  absl::Status Seal();

  int64_t slot_bytes() const;
  int64_t publication_bytes() const;

 private:
  std::vector<const Segment*> All() const;

  Segment control_, window_;
  std::vector<Segment> publications_, slots_;
};

}  // namespace shardmesh
