// GiveWay: lowers the priority of the calling thread, which does what may wait while steps want the processors.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

namespace shardmesh {

// `nice`: 0 to 19; at 19 it gets a 69th of a processor that others want, at 10 a tenth. There is no way back, so the thread is
// to end with what it does. It stays as it was if the kernel refuses.
inline void GiveWay(int nice) { setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), nice); }

}  // namespace shardmesh
