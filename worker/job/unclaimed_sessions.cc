#include "worker/job/unclaimed_sessions.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "worker/control/control_block.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);
}  // namespace

void UnclaimedSessions::Expect(std::map<uint64_t, std::vector<int>> sessions) {
  MutexLock lock(mu_);
  waiting_ = std::move(sessions);
  for (const auto& [session, slots] : waiting_) numbers_.insert(SessionOf(session));
}

absl::Status UnclaimedSessions::Claim(uint64_t session, absl::Span<const int> slots) {
  MutexLock lock(mu_);
  const auto found = waiting_.find(session);
  if (found == waiting_.end()) {
    return absl::NotFoundError(absl::StrCat("session ", SessionOf(session), " of rank ", AttachedTo(session),
                                            " is not waited for: it came back before, or too late; attach again"));
  }
  std::vector<int> said(slots.begin(), slots.end());
  std::sort(said.begin(), said.end());
  if (said != found->second) {
    return absl::InvalidArgumentError(absl::StrCat("session ", SessionOf(session), " holds slots ",
                                                   absl::StrJoin(found->second, ","), ", not ",
                                                   absl::StrJoin(said, ",")));
  }
  waiting_.erase(found);
  claimed_.SignalAll();
  return absl::OkStatus();
}

std::vector<int> UnclaimedSessions::Forget(int slot, uint64_t& session) {
  MutexLock lock(mu_);
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (std::find(it->second.begin(), it->second.end(), slot) == it->second.end()) continue;
    session = it->first;
    const std::vector<int> slots = std::move(it->second);
    waiting_.erase(it);
    claimed_.SignalAll();
    return slots;
  }
  return {};
}

void UnclaimedSessions::AwaitClaims(const std::function<bool()>& stop,
                                    const std::function<bool(const std::vector<int>&)>& lives,
                                    const std::function<void(uint64_t, const std::vector<int>&)>& give_up) {
  while (!stop()) {
    std::map<uint64_t, std::vector<int>> gone;
    {
      MutexLock lock(mu_);
      if (waiting_.empty()) return;
      claimed_.WaitFor(mu_, kSlice);
      for (auto it = waiting_.begin(); it != waiting_.end();) {
        const auto next = std::next(it);
        if (!lives(it->second)) gone.insert(waiting_.extract(it));
        it = next;
      }
    }
    for (const auto& [session, slots] : gone) give_up(session, slots);
  }
}

bool UnclaimedSessions::Knows(uint64_t number) const {
  MutexLock lock(mu_);
  return numbers_.count(number) > 0;
}

}  // namespace shardmesh
