#include "local/process/process_end.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace shardmesh {

UniqueFd OpenProcess(pid_t pid) { return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

bool HasEnded(pid_t pid) { return EndsWithin(pid, absl::ZeroDuration()); }

bool EndsWithin(pid_t pid, absl::Duration time) {
  if (pid <= 0) return false;
  const UniqueFd process = OpenProcess(pid);
  if (!process.valid()) return errno == ESRCH;
  pollfd end = {process.get(), POLLIN, 0};
  return poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(time))) == 1;
}

}  // namespace shardmesh
