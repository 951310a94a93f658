// RelayedRendezvous: a rendezvous of ranks on two hosts, the line between which is a TcpRelay. Tests only. Thread-safe.
#pragma once

#include <arpa/inet.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"
#include "worker/transport/rendezvous.h"
#include "worker/transport/testing/tcp_relay.h"

namespace shardmesh::testing {

// One rank's view. What a rank writes under a key that ends in its number is the address where it listens, "HOST PORT"
// (worker/transport/keyed_links.h): ranks of the other host get the relay's in its place.
class RelayedRendezvous final : public Rendezvous {
 public:
  // Ranks from `first_far` on are on the other host. `real` is common to all ranks. The relay outlives the object.
  RelayedRendezvous(TcpRelay* relay, std::shared_ptr<Rendezvous> real, int rank, int first_far)
      : relay_(relay), real_(std::move(real)), is_far_(rank >= first_far), first_far_(first_far) {}

  absl::Status Set(const std::string& key, absl::string_view value) override {
    int rank = 0;
    if (IsAddress(key, rank)) {
      const std::vector<std::string> parts = absl::StrSplit(value, ' ');
      sockaddr_in address = {};
      int port = 0;
      if (parts.size() != 2 || inet_pton(AF_INET, parts[0].c_str(), &address.sin_addr) != 1 ||
          !absl::SimpleAtoi(parts[1], &port)) {
        return absl::InvalidArgumentError(absl::StrCat("'", value, "' is no IPv4 address"));
      }
      address.sin_family = AF_INET;
      address.sin_port = htons(static_cast<uint16_t>(port));
      ASSIGN_OR_RETURN(address, relay_->Route(address, rank >= first_far_));
      RETURN_IF_ERROR(real_->Set(key + kRelayed, absl::StrCat(parts[0], " ", ntohs(address.sin_port))));
    }
    return real_->Set(key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    int rank = 0;
    const bool crosses = IsAddress(key, rank) && (rank >= first_far_) != is_far_;
    return real_->Get(crosses ? key + kRelayed : key, timeout);
  }

 private:
  static constexpr char kRelayed[] = "-relayed";
  static bool IsAddress(const std::string& key, int& rank) {
    return absl::SimpleAtoi(key.substr(key.rfind('/') + 1), &rank);
  }

  TcpRelay* const relay_;
  const std::shared_ptr<Rendezvous> real_;
  const bool is_far_;
  const int first_far_;
};

}  // namespace shardmesh::testing
