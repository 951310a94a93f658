// RelayedRendezvous: a rendezvous of ranks on two hosts, the line between which is a TcpRelay. Tests only. Thread-safe.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "core/status.h"
#include "worker/collectives/rendezvous.h"
#include "worker/collectives/testing/tcp_relay.h"

namespace shardmesh::testing {

// Puts the relay's addresses in the place of those that lead to the other host. A rank's value is one address for each
// of its peers, in the order of their ranks; an address begins with a sockaddr_in.
class RelayedRendezvous final : public Rendezvous {
 public:
  // Ranks from `first_far` on are on the other host. REQUIRES: at most ten ranks. The relay outlives the object.
  RelayedRendezvous(TcpRelay* relay, int num_ranks, int first_far)
      : relay_(relay), num_ranks_(num_ranks), first_far_(first_far) {}

  absl::Status Set(const std::string& key, absl::string_view value) override {
    const int rank = key.back() - '0';
    std::string relayed(value);
    const size_t length = relayed.size() / (num_ranks_ - 1);
    for (int i = 0; i < num_ranks_ - 1; ++i) {
      const int peer = i + (i >= rank);
      if ((peer >= first_far_) == (rank >= first_far_)) continue;
      sockaddr_in address;
      std::memcpy(&address, &relayed[i * length], sizeof(address));
      ASSIGN_OR_RETURN(address, relay_->Route(address, rank >= first_far_));
      std::memcpy(&relayed[i * length], &address, sizeof(address));
    }
    return real_.Set(key, relayed);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    return real_.Get(key, timeout);
  }

 private:
  TcpRelay* const relay_;
  const int num_ranks_, first_far_;
  MemoryRendezvous real_;
};

}  // namespace shardmesh::testing
