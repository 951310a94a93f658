// UnclaimedSessions: sessions of trainers that were attached to a worker's last incarnation. Each may come back to this
// one, once. A trainer that computes does not look at its connection, and may write its windows: so each is waited for
// as long as its process lives; those whose processes are gone are given up. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/base/sync.h"

namespace shardmesh {

class UnclaimedSessions {
 public:
  // By holder (control_block.h): the slots. Called once, before the others.
  void Expect(std::map<uint64_t, std::vector<int>> sessions);

  // The trainer of that session is back, and holds these slots. NotFound: nobody waits for it (it came before, or too
  // late). InvalidArgument: it held other slots.
  absl::Status Claim(uint64_t session, absl::Span<const int> slots);

  // The session that holds the slot is not waited for any more: its trainer says itself that it attaches anew. All of
  // its slots; none: nobody waits for it. `session`: which.
  std::vector<int> Forget(int slot, uint64_t& session);

  // Waits until nobody is waited for any more: those for whom `lives`(slots) is false are given up, by give_up(session,
  // slots). Ends early when stop(); the functions are called several times a second.
  void AwaitClaims(const std::function<bool()>& stop, const std::function<bool(const std::vector<int>&)>& lives,
                   const std::function<void(uint64_t, const std::vector<int>&)>& give_up);

  // Whether a session of that number (SessionOf) was expected: a new one must have another.
  bool Knows(uint64_t number) const;

 private:
  mutable Mutex mu_;
  CondVar claimed_;
  std::map<uint64_t, std::vector<int>> waiting_ ABSL_GUARDED_BY(mu_);
  std::set<uint64_t> numbers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
