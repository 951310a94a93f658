// OrphanSessions: sessions of trainers that were attached to a worker's last life. Each may come back to this one, once.
// A trainer that computes does not look at its connection: so each is waited for as long as its process lives. Those
// whose processes are gone, or are not seen from here, are given up when the time is over. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/sync.h"

namespace shardmesh {

class OrphanSessions {
 public:
  // By holder (control_page.h): the slots. Called once, before the others.
  void Expect(std::map<uint64_t, std::vector<int>> sessions);

  // The trainer of that session is back, and holds these slots. NotFound: nobody waits for it (it came before, or too
  // late). InvalidArgument: it held other slots.
  absl::Status Claim(uint64_t session, absl::Span<const int> slots);

  // Waits until nobody is waited for any more: from `timeout` on those for whom `lives`(slots) is false are given up,
  // by give_up(session, slots). Ends early when stop(); the functions are called several times a second.
  void AwaitClaims(absl::Duration timeout, const std::function<bool()>& stop,
                   const std::function<bool(const std::vector<int>&)>& lives,
                   const std::function<void(uint64_t, const std::vector<int>&)>& give_up);

  // The largest session number (SessionOf) that was expected; 0: none was. A new session must have a larger one.
  uint64_t newest() const;

 private:
  mutable Mutex mu_;
  CondVar claimed_;
  std::map<uint64_t, std::vector<int>> waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t newest_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace shardmesh
