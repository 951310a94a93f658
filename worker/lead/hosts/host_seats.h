// HostSeats: of a job on several hosts whose slots are pulled (worker/control/pulled_words.h). Every lead has the whole
// table on its control block, and all change it alike: in each round they say who sits in their seats, who waits for a
// slot and what was finished, and then each makes the same changes in the same order: sessions that ended, slots that
// are late, what was finished, and then slots for those who wait, by seat. So a trainer is told of its slot, or of what
// it finished, one round after it asked.
//
// What lies in a trainer's window lies on its host until a sum is made of it: then it goes to the hosts with the shards
// (command_data.h).
//
// For the lead's thread.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "worker/lead/hosts/host_words.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

class HostSeats {
 public:
  // Of slots that trainers of other hosts have, nanoseconds: their own lead says when one is late.
  static constexpr int64_t kNoClock = std::numeric_limits<int64_t>::max() / 2;

  // Borrowed arguments outlive the object.
  HostSeats(StepProtocol& protocol, const JobSpec& job, const Plan& plan);

  // What this host says of its seats.
  void Read(HostWords& words) const;
  // The changes that follow from what all said. No effect before the job has weights.
  void TakeIn(AllHostWords words);
  // The windows whose results a command of kMerge sums, with the host that each lies on.
  std::vector<SeatWindow> WindowsOf(const Command& command) const;

 private:
  void Finish(int seat, int host, AllHostWords words);

  StepProtocol& protocol_;
  const JobSpec& job_;
  const Plan& plan_;
};

}  // namespace shardmesh
