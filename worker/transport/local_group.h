// LocalGroup: ranks that are threads of one process, as plain as can be: the oracle of the other implementations.
//
//   auto hub = std::make_shared<LocalHub>(size);
//   LocalGroup group(hub, rank, epoch)   in each thread
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/sync.h"
#include "worker/transport/exchange_group.h"

namespace shardmesh {

// Where the ranks meet. Thread-safe.
class LocalHub {
 public:
  // What a rank shows its peers during a call.
  struct Post {
    CallHeader header;
    const char* mine = nullptr;
    absl::Span<const void* const> slots;
    absl::Span<const PeerTransfer> transfers;
  };

  explicit LocalHub(int size, RankNames names = {}) : size_(size), names_(names), posts_(size), arrivals_(size) {}

  int size() const { return size_; }
  const RankNames& names() const { return names_; }

  // Returns when every rank has come as often as this one. Unavailable: not in time (and the hub is ended); Aborted.
  // After Enter has succeeded the rank may read what its peers posted, until it calls Leave, which it must. Nobody
  // returns with an error while somebody reads: what was posted is the caller's again as soon as its call is over.
  absl::Status Enter(int rank, const Post& post, absl::Duration timeout);
  absl::Status Leave(int rank, const CallHeader& header, absl::Duration timeout);
  // Ends the hub; the first reason counts.
  void End(absl::string_view reason);

  // Of a rank that met and has not met again.
  Post PostOf(int rank) const;

 private:
  absl::Status WaitForAllLocked(uint64_t arrivals, const CallHeader& header, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AllHereLocked(uint64_t arrivals) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndLocked(absl::string_view reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int size_;
  const RankNames names_;
  mutable Mutex mu_;
  CondVar changed_;
  std::vector<Post> posts_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> arrivals_ ABSL_GUARDED_BY(mu_);
  int readers_ ABSL_GUARDED_BY(mu_) = 0;  // that have yet to leave; they copy, and wait for nothing
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::string reason_ ABSL_GUARDED_BY(mu_);
};

class LocalGroup final : public ExchangeGroup {
 public:
  LocalGroup(std::shared_ptr<LocalHub> hub, int rank, uint64_t epoch)
      : ExchangeGroup(rank, hub->size(), epoch, hub->names()), hub_(std::move(hub)) {}

  absl::string_view name() const override { return "local"; }
  void Abort(absl::string_view reason) override { hub_->End(reason); }

 protected:
  absl::Status DoBarrier(const CallHeader& header, absl::Duration timeout) override;
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) override;
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) override;
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) override;
  absl::Status DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                               absl::Duration timeout) override;
  absl::Status DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                          absl::Duration timeout) override;

 private:
  // All meet, agree on the call, each does its part, and all meet again.
  template <class Part>
  absl::Status Together(const LocalHub::Post& post, absl::Duration timeout, const Part& part);

  const std::shared_ptr<LocalHub> hub_;
};

}  // namespace shardmesh
