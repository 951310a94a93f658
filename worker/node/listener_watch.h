// ListenerWatch: looks from time to time whether a listener can be reached, and has it listen again if not: cleaners of
// temporary folders remove sockets that are in use. Logs both. For the listener's thread.
#pragma once

#include <string>
#include <utility>

#include "absl/time/time.h"
#include "local/socket/socket.h"

namespace shardmesh {

class ListenerWatch {
 public:
  static constexpr absl::Duration kEvery = absl::Seconds(1);

  // `of`: who listens, for the log. `listener` outlives the object.
  ListenerWatch(LocalListener& listener, std::string of) : listener_(listener), of_(std::move(of)) {}

  // A look, once kEvery has passed since the last. `now`: of MonotonicNow(); call it more often than that.
  void Look(absl::Time now);

 private:
  LocalListener& listener_;
  const std::string of_;
  absl::Time next_ = absl::InfinitePast();
  std::string said_;  // the error that was logged last
};

}  // namespace shardmesh
