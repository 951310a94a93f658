#include "worker/doors/trainer_watch.h"

#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

// Whether a process of this host is stopped by a signal: "T" behind its name in parentheses, of proc(5).
bool IsStopped(int64_t pid) {
  if (pid <= 0) return false;
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');
  return name_end != std::string::npos && text.compare(name_end, 3, ") T") == 0;
}

bool IsThere(uint64_t holder) { return holder != 0 && (holder & kLeaving) == 0; }

}  // namespace

// Of pulled slots none counts as left: those of a trainer that is gone are open again, for others.
TrainerWatch::TrainerWatch(const StepProtocol& protocol) : pulled_(protocol.job().pulled()) {
  for (int s = 0; s < protocol.job().num_slots && !pulled_; ++s) {
    times_left_[s] = protocol.control()->slots[s].times_left.load();
  }
  Look(protocol);
}

void TrainerWatch::Look(const StepProtocol& protocol) {
  for (int s = 0; s < protocol.job().num_slots && !pulled_; ++s) {
    if (protocol.control()->elsewhere[s].holder.load() != 0) seen_.set(s);
  }
}

v1::AwaitedTrainer::State TrainerWatch::StateOf(const MissingSlot& missing) const {
  if (IsThere(missing.holder)) {
    return IsStopped(missing.pid) ? v1::AwaitedTrainer::STOPPED : v1::AwaitedTrainer::ATTACHED;
  }
  if (IsThere(missing.far_holder)) return v1::AwaitedTrainer::ATTACHED;
  const bool left = !pulled_ && (missing.times_left != times_left_[missing.slot] || seen_.test(missing.slot));
  return left ? v1::AwaitedTrainer::LEFT : v1::AwaitedTrainer::ABSENT;
}

bool TrainerWatch::Tell(const StepProtocol& protocol, v1::TrainerReply& reply) const {
  bool left = false;
  for (const MissingSlot& missing : protocol.outcomes().MissingSlots(protocol.committed_step().next())) {
    v1::AwaitedTrainer& awaited = *reply.add_awaited();
    awaited.set_slot(missing.slot);
    awaited.set_state(StateOf(missing));
    awaited.set_pid(missing.pid);
    left = left || awaited.state() == v1::AwaitedTrainer::LEFT;
  }
  return left;
}

}  // namespace shardmesh
