// SecureGroups of ranks in this process, and certificates for them. Tests only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "worker/transport/rendezvous.h"
#include "worker/transport/secure/secure_group.h"
#include "worker/transport/testing/group_family.h"

namespace shardmesh {

// Certificates that the openssl program makes, once for a process, in its folder for temporary files:
//   ca, other_ca                        authorities
//   first, second, expired              signed by ca; the last one's time is over
//   stranger                            signed by other_ca
TlsOptions TlsFiles(const std::string& certificate, const std::string& authority = "ca");

// What rank `rank` of `size` on this machine says, in epoch 5 of the group "group".
SecureOptions OptionsOf(int rank, int size, bool tls);

// All ranks connect, each on a thread of its own; rank r with options[r].
std::vector<absl::StatusOr<std::unique_ptr<SecureGroup>>> ConnectAll(const std::shared_ptr<Rendezvous>& rendezvous,
                                                                     const std::vector<SecureOptions>& options);

// The family of group_suite.h. Ranks of different epochs do not become a group: they get one all of whose calls return
// why Connect failed.
Groups MakeSecureGroups(const std::vector<uint64_t>& epochs, bool tls);

}  // namespace shardmesh
