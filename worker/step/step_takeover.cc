// Of StepProtocol: what the next incarnation of a member finds on the control block, and goes on with.
#include <algorithm>
#include <set>

#include "local/futex.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

void StepProtocol::TakeOver() {
  const int self = self_.value();
  for (int s = 0; s < job_->num_writers(); ++s) {
    control_->slots[s].declaring[self].store(0);
    for (int p = 0; p < plan_->num_shards(); ++p) {
      int32_t mine = self + 1;
      control_->pushes[s][p].compare_exchange_strong(mine, 0);
    }
  }
  const bool writes = decided() != committed() || QuantizeFollows(ReadCommitted(*control_), *plan_);
  publications_.TakeOver(self == local_.first(), writes ? command().publish : -1);
  TakeOverMember(control_->members[self]);
  if (plan_->pulled() && self == local_.first()) Pulled().EndTakes(MonotonicNanos());
  if (self == local_.first() && control_->taking_messages.load() % 2 == 1) control_->taking_messages.fetch_add(1);
}

void StepProtocol::TakeOverMember(MemberWords& words) {
  // Gradient shards of initial weights were in the process: nobody else has this one. What was loaded lies in the
  // storage.
  const bool placed = words.done.load() > 0;
  const bool loaded = decided() > 0 && command().kind == CommandKind::kRestore && command().initial_id != 0 &&
                      command().initial_id == words.loaded_id.load();
  const bool lost = !placed && ((decided() > 0 && !loaded) || words.initial_id.load() != 0);
  // A command that ends every incarnation will end this one, too.
  const uint64_t open = decided() != committed() ? decided() : 0;
  words.incarnations_in_command.store(
      open != 0 && words.incarnations_of.load() == open ? words.incarnations_in_command.load() + 1 : 1);
  words.incarnations_of.store(open);
  const bool hopeless = open != 0 && words.incarnations_in_command.load() > kMaxIncarnationsInCommand;
  if (lost || hopeless) Abort(AbortReason::kGone, self_.value(), self_);
}

void StepProtocol::GoesOn(int64_t now_nanos, int64_t away_since_nanos) {
  MemberWords& words = control_->members[self_.value()];
  words.pause_nanos.store(away_since_nanos == 0 ? 0 : std::max<int64_t>(now_nanos - away_since_nanos, 0));
  words.restarts.fetch_add(1);
}

SessionsHere StepProtocol::Sessions() const {
  SessionsHere sessions;
  std::set<uint64_t> leaving;
  for (int s = 0; s < job_->num_writers(); ++s) {
    const uint64_t word = control_->slots[s].holder.load(), holder = word & ~kLeaving;
    if (holder == 0 || AttachedTo(holder) != self_.value()) continue;
    sessions.staying[holder].push_back(s);
    if (word != holder) leaving.insert(holder);
  }
  for (const uint64_t holder : leaving) sessions.leaving.insert(sessions.staying.extract(holder));
  return sessions;
}

}  // namespace shardmesh
