// Whether a process of this host has ended: by its process descriptor (pidfd), which tells the end of all its threads,
// also before its parent reaps it.
#pragma once

#include <sys/types.h>

#include "absl/time/time.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

// A descriptor that is readable once the process has ended. Invalid, with errno: there is no such process (ESRCH), or
// the system refuses.
UniqueFd OpenProcess(pid_t pid);

// Whether there is no such process, or it has ended. A process that cannot be asked about counts as alive, and so does
// one that is not seen from here (`pid` 0 or less: of another pid namespace).
bool HasEnded(pid_t pid);
// Whether it has ended within that time.
bool EndsWithin(pid_t pid, absl::Duration time);

}  // namespace shardmesh
