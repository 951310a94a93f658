// VersionLeases: who keeps published versions where they are, beyond a single read: leases that this worker granted
// over RPC, and the readers attached to it that map publications.
//
// A lease names one version and ends at a time unless it is renewed. It is a row of the control block, so it outlives
// its worker where a node has the memory. A reader that maps publications holds what it holds by the kernel's word
// (local/memory/file_hold.h), until it lets go or is gone: its memory is never written before, however long it is
// silent. Silent for longer than the time that it asked for, what it holds counts as abandoned, which is reported; it
// goes on taking one of the job's publications.
//
// One object for each worker and job, of its own rows; what it lists is all of the host. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "worker/versions/publications.h"

namespace shardmesh {

inline constexpr absl::Duration kMinLease = absl::Milliseconds(100), kMaxLease = absl::Hours(24);
// A publication counts as leased for so long after the lease has ended: a renewal in the last moment comes first.
inline constexpr absl::Duration kLeaseGrace = absl::Milliseconds(100);

class VersionLeases {
 public:
  struct Lease {
    uint64_t id = 0;
    Step step;
    int buffer = 0;
    int64_t expires_nanos = 0;
  };
  // One holder of one version, for people.
  struct Holder {
    Step step;
    uint64_t lease = 0;      // 0: a reader that maps it,
    int place = -1;          // with this place
    int64_t pid = 0;         // and process; 0: not known
    int64_t left_nanos = 0;  // below zero: abandoned since
  };

  // `mapped_at`: whether the reader at a place holds a publication; borrowed arguments outlive the object.
  VersionLeases(ControlBlock* control, Publications* publications, const JobSpec* job, Rank self,
                std::function<bool(int buffer, int place)> mapped_at, std::function<int64_t()> now = MonotonicNanos)
      : control_(control),
        publications_(publications),
        job_(job),
        self_(self),
        mapped_at_(std::move(mapped_at)),
        now_(std::move(now)) {}

  // Leases the version. nullopt: it is not there. The same nonce again: the same lease. ResourceExhausted: the host's
  // workers have granted as many as they can, or `caller` (CallerKey of rpc/calls/caller_share.h) has its share of
  // them. Callers are known while this process lives: what its last incarnation granted counts as nobody's.
  absl::StatusOr<std::optional<Lease>> Acquire(Step step, absl::Duration ttl, uint64_t nonce,
                                               const std::string& caller = "");
  // NotFound: no lease of this worker has that id, or it has ended. PermissionDenied: it was acquired with another
  // nonce; nothing changed.
  absl::StatusOr<Lease> Renew(uint64_t id, uint64_t nonce, absl::Duration ttl);
  absl::Status Release(uint64_t id, uint64_t nonce);
  // Pins the publication of a lease that any worker of the host granted. NotFound: as Renew.
  absl::StatusOr<Lease> PinLeased(uint64_t id);

  // Whether any worker of the host granted it, and it has not ended; whether there is any at all.
  bool Knows(uint64_t id) const;
  bool Any() const;

  // A place for a reader. ResourceExhausted: all are taken.
  absl::StatusOr<int> TakePlace(int64_t pid, absl::Duration ttl);
  void Heard(int place);
  // Its connection has ended. What it maps it holds.
  void LeavePlace(int place);
  // The readers of this worker's last incarnation have lost their connections.
  void TakeOver();
  // Gives rows back that nobody needs any more: from time to time.
  void Sweep();

  // Everybody who holds a version on this host, by version.
  std::vector<Holder> List() const;

 private:
  LeaseWords* LiveRow(uint64_t id) const;
  LeaseWords* FreeRow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckShareOf(const std::string& caller) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Unknown(uint64_t id) const;
  absl::Status CheckNonce(const LeaseWords& row, uint64_t nonce) const;
  bool HoldsAny(int place) const;

  ControlBlock* const control_;
  Publications* const publications_;
  const JobSpec* const job_;
  const Rank self_;
  const std::function<bool(int, int)> mapped_at_;
  const std::function<int64_t()> now_;
  mutable Mutex mu_;  // over this worker's rows
  std::map<uint64_t, std::string> callers_ ABSL_GUARDED_BY(mu_);  // who has which lease of these; not of all
};

}  // namespace shardmesh
