// SecureOptions: what a rank says to become one of a SecureGroup (secure_group.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "rpc/tls/tls.h"
#include "worker/transport/group.h"

namespace shardmesh {

struct SecureOptions {
  int rank = 0, size = 1;
  uint64_t epoch = 0;  // of the job
  RankNames names;     // of ranks in messages
  std::string key;     // of the group at the rendezvous; not used before
  std::string secret;  // of the job, which its ranks alone know; not empty
  std::string host;    // this host's address as peers see it; empty: that of its name
  TlsOptions tls;      // not enabled: bytes cross in the clear, for networks that nobody else reaches
  absl::Duration timeout = absl::Seconds(30);  // to find and connect all peers
};

}  // namespace shardmesh
