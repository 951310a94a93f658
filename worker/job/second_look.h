// SecondLook: from when a session of a trainer ends, the steps of its job look again at the gradients that they read
// (ControlBlock::looks_again), for as long as the trainer's process lives: it may have its slots mapped still.
//
// A process that is killed hangs up its sockets a moment before it has ended. So the object, which is made before the
// slots are given back, waits at its end whether the process ends now; then the steps look no more. Otherwise they look
// until the job ends: who else may have the mapping by then is not known. Thread-safe between objects.
#pragma once

#include <sys/types.h>

#include "worker/control/control_block.h"

namespace shardmesh {

class SecondLook {
 public:
  // `process`: of the trainer; 0: one that is not seen from here, which counts as alive.
  SecondLook(ControlBlock& control, pid_t process);
  // Takes at most 200 ms.
  ~SecondLook();
  SecondLook(const SecondLook&) = delete;
  SecondLook& operator=(const SecondLook&) = delete;

 private:
  ControlBlock& control_;
  const pid_t process_;
  const bool lives_;
};

}  // namespace shardmesh
