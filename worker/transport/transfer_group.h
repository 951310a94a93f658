// TransferGroup: a group whose collectives are made of transfers between two ranks each: an implementation has DoExchange
// alone. Every piece goes straight to the rank that needs it; nothing is added on the way.
#pragma once

#include <cstring>
#include <vector>

#include "worker/transport/exchange_group.h"

namespace shardmesh {

class TransferGroup : public ExchangeGroup {
 public:
  using ExchangeGroup::ExchangeGroup;

 protected:
  absl::Status DoBarrier(const CallHeader& header, absl::Duration timeout) final {
    return DoExchange(header, {}, timeout);
  }
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) final {
    return SendShards(header, mine, 0, all, timeout);
  }
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) final {
    return SendShards(header, mine, header.bytes, theirs, timeout);
  }
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) final {
    std::vector<PeerTransfer> transfers;
    for (int i = 0; i < size(); ++i) {
      if (i != root) transfers.push_back({root, i, memory, header.bytes});
    }
    return DoExchange(header, transfers, timeout);
  }

  // The `i`-th peer, from 0: not all ranks begin with the same one.
  int PeerAt(int i) const { return (rank() + 1 + i) % size(); }

 private:
  // This rank's piece for rank r is `mine` + r * stride, and that from r goes to theirs[r].
  absl::Status SendShards(const CallHeader& header, const char* mine, int64_t stride, char* theirs,
                          absl::Duration timeout) {
    std::vector<PeerTransfer> transfers;
    for (int i = 0; i < size() - 1; ++i) {
      const int peer = PeerAt(i);
      transfers.push_back({rank(), peer, const_cast<char*>(mine) + peer * stride, header.bytes});
      transfers.push_back({peer, rank(), theirs + peer * header.bytes, header.bytes});
    }
    if (header.bytes > 0) {
      std::memmove(theirs + rank() * header.bytes, mine + rank() * stride, static_cast<size_t>(header.bytes));
    }
    return DoExchange(header, transfers, timeout);
  }
};

}  // namespace shardmesh
