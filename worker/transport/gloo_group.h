// GlooGroup: ranks on hosts that TCP connects, over Gloo's transport (one connection of every two ranks for calls, one
// for news). Every piece goes straight to the rank that needs it; nothing is added on the way.
//
// A call begins with a header from every rank to every other: bulk bytes are sent only after all agree. A dead peer's
// connections are closed by its kernel, and it is named at once; a stopped one half a second after the time is up, in
// which all tell whom they wait for (late_ranks.h). A rank that ends the group tells its peers why before it closes its
// connections. One that is destroyed after its last call takes nothing from peers that are still at that call.
//
// Gloo closes connections one by one, in up to 10 ms each: a call of n ranks that failed may take n * 10 ms longer than
// its limit. Its sockets stay open in child processes that are forked later, until those run another program: then a
// death is not seen at once. Strangers cannot take a rank's place (keyed_links.h); what crosses is not encrypted. Gloo
// is mentioned nowhere outside of this group and its gloo_connections.h; its exceptions end here.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/sync.h"
#include "worker/transport/transfer_group.h"
#include "worker/transport/rendezvous.h"

namespace shardmesh {

class GlooConnections;

struct GlooOptions {
  int rank = 0, size = 1;
  uint64_t epoch = 0;
  RankNames names;                             // of ranks in messages
  std::string key;                             // of the group at the rendezvous; not used before
  std::string interface;                       // eth0, say; empty: that of `host`
  std::string host;                            // this host's address as peers see it; empty: that of its name
  absl::Duration timeout = absl::Seconds(30);  // to find and connect all peers
};

class GlooGroup final : public TransferGroup {
 public:
  // Ignores SIGPIPE for the process where it would end it: Gloo writes to connections that peers may have closed.
  //   InvalidArgument: options. Unavailable: a peer could not be connected in time; it is named.
  static absl::StatusOr<std::unique_ptr<GlooGroup>> Connect(const std::shared_ptr<Rendezvous>& rendezvous,
                                                            const GlooOptions& options);
  ~GlooGroup() override;

  absl::string_view name() const override { return "gloo"; }
  void Abort(absl::string_view reason) override;

 protected:
  absl::Status DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                          absl::Duration timeout) override;

 private:
  struct Transfer;  // of one piece

  struct Call {
    const CallHeader& header;
    absl::Duration timeout;
    absl::Time until;
  };

  GlooGroup(const GlooOptions& options, std::unique_ptr<GlooConnections> connections);

  // Headers from all to all, checked.
  absl::Status Agree(const Call& call);
  // This rank's part of the transfers; those between two ranks in their order.
  absl::Status MoveAll(const Call& call, absl::Span<const PeerTransfer> all);
  // Starts the transfers and waits for all.
  absl::Status Move(const Call& call, std::vector<Transfer>& transfers);
  // Ends the group because the time is up: names those that hold the call up.
  absl::Status Late(const Call& call, std::vector<Transfer>& transfers);
  // After a call failed: until the group has ended, by what a peer tells, or the time is over.
  void AwaitEnd(absl::Duration time);

  // Aborted if the group is over; else the waits of these transfers, until Exit, end with the group.
  absl::Status Enter(std::vector<Transfer>& transfers);
  void Exit();

  // Ends the group, if nothing has yet, and returns what did, as the call under way returns it.
  absl::Status End(const absl::Status& status);
  absl::Status EndLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The watcher's thread: what peers tell, and who dies.
  void Watch();
  // Whether the group goes on after what peers have told so far.
  bool ReadNews();
  absl::Status WhoIsGone();
  // Unavailable: somebody left before this call.
  absl::Status CheckAllHereLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::unique_ptr<GlooConnections> connections_;
  uint64_t exchanges_ = 0;
  mutable Mutex mu_;
  CondVar changed_;                                  // end_
  absl::Status end_ ABSL_GUARDED_BY(mu_);            // OK: the group goes on
  uint64_t call_ ABSL_GUARDED_BY(mu_) = 0;           // the last one begun
  std::vector<uint64_t> last_ ABSL_GUARDED_BY(mu_);  // each rank's last call, where it left
  std::vector<Transfer>* waited_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::thread watcher_;
};

}  // namespace shardmesh
