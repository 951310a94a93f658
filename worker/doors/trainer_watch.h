// TrainerWatch: what one session is told of the other trainers while it waits for their slots: who is attached, whose
// process is stopped, and who has left since the session began. For the thread of the session's connection.
#pragma once

#include <bitset>
#include <cstdint>

#include "core/job/job.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

class TrainerWatch {
 public:
  // The session begins.
  explicit TrainerWatch(const StepProtocol& protocol);
  // Notes whose slots other hosts hold. Called several times a second: a trainer of another host that stays for less
  // may be missed, and counts as one that has not come.
  void Look(const StepProtocol& protocol);
  // The trainers of the slots that the open step waits for, into `reply`. True: one of them has left.
  bool Tell(const StepProtocol& protocol, v1::TrainerReply& reply) const;

 private:
  v1::AwaitedTrainer::State StateOf(const MissingSlot& missing) const;

  const bool pulled_;
  uint32_t times_left_[kMaxSlots] = {};  // when the session began
  std::bitset<kMaxSlots> seen_;          // slots that were held on another host
};

}  // namespace shardmesh
