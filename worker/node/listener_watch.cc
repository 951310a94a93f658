#include "worker/node/listener_watch.h"

#include <spdlog/spdlog.h>

namespace shardmesh {

void ListenerWatch::Look(absl::Time now) {
  if (now < next_) return;
  next_ = now + kEvery;
  if (listener_.IsReachable()) return;
  const absl::Status again = listener_.ListenAgain();
  if (again.ok()) {
    spdlog::warn("event=socket_restored of={} path={} hint=\"its file was removed; exclude the folder from cleaning, or "
                 "choose another --local-dir\"",
                 of_, listener_.path());
  } else if (again.ToString() != said_) {
    spdlog::error("event=socket_lost of={} path={} error=\"{}\"", of_, listener_.path(), again.ToString());
  }
  said_ = again.ok() ? "" : again.ToString();
}

}  // namespace shardmesh
