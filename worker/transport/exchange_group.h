// ExchangeGroup: a group whose ranks also send pieces of any size straight from one's memory into another's.
#pragma once

#include "worker/transport/group.h"

namespace shardmesh {

// Bytes that go from a rank to another one. The sender's may not be written, and the receiver's not be touched, until
// the call returns on their rank.
struct PeerTransfer {
  int from = 0, to = 0;
  char* memory = nullptr;  // this rank's, where it is one of the two
  int64_t bytes = 0;
};

class ExchangeGroup : public Group {
 public:
  using Group::Group;

  // Makes all transfers at once; returns when this rank's are complete. Every rank gives the same ones in the same
  // order, each with its own memory. Errors as group.h; FailedPrecondition: a peer gave other transfers.
  absl::Status Exchange(absl::Span<const PeerTransfer> transfers, absl::Duration timeout);

 protected:
  virtual absl::Status DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                                  absl::Duration timeout) = 0;
};

}  // namespace shardmesh
