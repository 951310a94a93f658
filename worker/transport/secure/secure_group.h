// SecureGroup: ranks on hosts that TCP connects, each two by one connection, over TLS 1.3 with certificates of both
// sides, or in the clear. Both ends have proved that they know the job's secret (link_mesh.h, handshake.h).
//
// A call runs on its caller's thread: it sends to all peers and takes from all at the same time, straight from and into
// the caller's memory. Every piece goes to the rank that needs it; nothing is added on the way. A rank is done with a
// call when every peer has come to it and has its bytes.
//
// What a peer sends is compared with what the call expects before a byte of it is taken: wrong bytes end the group with
// an error that names the peer, and nothing else. A dead peer's connection is closed by its kernel, and it is named at
// once by who waits for it; a stopped one within a second after the time is up, in which all tell whom they wait for
// (late_ranks.h). A rank that ends the group tells its peers why, behind at most one chunk of 512 KiB that is under
// way.
//
// Sockets are closed on exec. A child process that runs no other program holds copies of them: then this rank's death
// is not seen at once.
#pragma once

#include <poll.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"
#include "worker/transport/transfer_group.h"
#include "worker/transport/rendezvous.h"
#include "worker/transport/secure/link.h"
#include "worker/transport/secure/secure_options.h"

namespace shardmesh {

// Errors of calls: those of group.h, and
//   DataLoss: a peer sent bytes that no rank sends at that place, or that TLS does not accept; it is named.
class SecureGroup final : public TransferGroup {
 public:
  // With TLS: ignores SIGPIPE for the process where it would end it.
  //   InvalidArgument: options, or their TLS files. Otherwise: as ConnectMesh.
  static absl::StatusOr<std::unique_ptr<SecureGroup>> Connect(const std::shared_ptr<Rendezvous>& rendezvous,
                                                              const SecureOptions& options);
  // Tells the peers that this rank leaves, and waits for what is under way to them, some seconds at most.
  ~SecureGroup() override;

  absl::string_view name() const override { return secure_ ? "tls" : "tcp"; }
  void Abort(absl::string_view reason) override;

 protected:
  absl::Status DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                          absl::Duration timeout) override;

 private:
  struct Call {
    const CallHeader& header;
    absl::Duration timeout;
    absl::Time until;
  };

  SecureGroup(const SecureOptions& options, UniqueFd wake);
  Link& LinkWith(int peer) { return *links_[static_cast<size_t>(peer)]; }
  // Gives each link its part of the transfers, in their order.
  void Begin(const CallHeader& header, absl::Span<const PeerTransfer> transfers);
  absl::Status Run(const Call& call);
  // All links go on as far as they can; then waits for one that can, until that time.
  absl::Status Turn(absl::Time until);
  bool AllDone() const;
  // The time is up: names those that hold the call up.
  absl::Status Late(const Call& call);

  // Aborted if the group is over; else the links are this call's, until Exit. Returns what the call does.
  absl::Status Enter(const CallHeader& header);
  absl::Status Exit(absl::Status status);
  absl::Status EndLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Only who has the links:
  void TellEnd(absl::string_view reason);
  void FlushAll(absl::Duration time);
  void Linger(absl::Duration time);

  const bool secure_;
  const UniqueFd wake_;                       // an eventfd: the group was ended
  std::vector<std::unique_ptr<Link>> links_;  // by rank; this rank's is null
  std::vector<pollfd> polled_;
  Mutex mu_;
  absl::Status end_ ABSL_GUARDED_BY(mu_);          // OK: the group goes on
  bool links_taken_ ABSL_GUARDED_BY(mu_) = false;  // by a call, or by Abort
  CallHeader last_ ABSL_GUARDED_BY(mu_);           // call
};

}  // namespace shardmesh
