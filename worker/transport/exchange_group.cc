#include "worker/transport/exchange_group.h"

#include "absl/strings/str_cat.h"

namespace shardmesh {

absl::Status ExchangeGroup::Exchange(absl::Span<const PeerTransfer> transfers, absl::Duration timeout) {
  int64_t bytes = 0;
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const PeerTransfer& transfer : transfers) {
    const bool mine = transfer.from == rank() || transfer.to == rank();
    if (transfer.from < 0 || transfer.from >= size() || transfer.to < 0 || transfer.to >= size() ||
        transfer.from == transfer.to || transfer.bytes < 1 || (mine && transfer.memory == nullptr)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "exchange: ", transfer.bytes, " bytes from rank ", transfer.from, " to rank ", transfer.to, " of ", size(),
          mine && transfer.memory == nullptr ? " without memory" : "; give at least 1, between two ranks"));
    }
    bytes += transfer.bytes;
    for (const int64_t value : {int64_t{transfer.from}, int64_t{transfer.to}, transfer.bytes}) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211u;
    }
  }
  return DoExchange(NextHeader(CallKind::kExchange, bytes, static_cast<uint32_t>(hash ^ hash >> 32)), transfers,
                    timeout);
}

}  // namespace shardmesh
