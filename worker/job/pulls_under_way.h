// PullsUnderWay: who reads a job's publications through a Pull of this worker, for messages and ListLeases. A pull is
// here for as long as it pins its publication. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/base/sync.h"

namespace shardmesh {

class PullsUnderWay {
 public:
  struct Pull {
    Step step;
    int buffer = 0;      // the publication
    std::string puller;  // who called, in plain text
    absl::Time unread_since =
        absl::InfiniteFuture();  // MonotonicNow() of the message that is not taken; infinite: none
  };

  // The pull's number, for the others, which ignore one that is not there. REQUIRES: its publication is pinned.
  uint64_t Enter(Step step, int buffer, std::string puller) {
    MutexLock lock(mu_);
    pulls_.emplace(++last_, Pull{step, buffer, std::move(puller)});
    return last_;
  }
  // A message of it is to be taken since then; infinite: it was taken.
  void SetUnread(uint64_t pull, absl::Time since) {
    MutexLock lock(mu_);
    if (const auto found = pulls_.find(pull); found != pulls_.end()) found->second.unread_since = since;
  }
  void Leave(uint64_t pull) {
    MutexLock lock(mu_);
    pulls_.erase(pull);
  }

  std::vector<Pull> List() const {  // in the order of Enter
    MutexLock lock(mu_);
    std::vector<Pull> pulls;
    for (const auto& [number, pull] : pulls_) pulls.push_back(pull);
    return pulls;
  }

 private:
  mutable Mutex mu_;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Pull> pulls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
