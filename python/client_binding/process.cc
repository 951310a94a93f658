#include "python/client_binding/process.h"

#include <atomic>

#include "absl/strings/str_cat.h"

namespace shardmesh::python {

absl::Status EnterProcess() {
  static std::atomic<pid_t> user{0};
  pid_t first = 0;
  const pid_t now = getpid();
  if (user.compare_exchange_strong(first, now) || first == now) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("process ", now, " was forked from process ", first,
                   ", which uses the service; connections do not survive that. Connect in a process that is started "
                   "anew (multiprocessing: \"spawn\" or \"forkserver\"), or fork before the first connection"));
}

}  // namespace shardmesh::python
