// What ends streams that stand still: a peer whose process lives and that neither reads nor writes would hold what its
// call has for as long as its deadline is away.
#pragma once

#include <functional>

#include "absl/time/time.h"

namespace shardmesh {

// Of a push: without data for this many heartbeat time-outs it is over.
inline constexpr int kPushSilence = 2;
// Of a pull: so long after a message that the reader did not take it is over.
inline constexpr absl::Duration kPullSilence = absl::Seconds(30);
inline constexpr absl::Duration kStallLook = absl::Milliseconds(500);

// Calls `look` every kStallLook, from a thread of gRPC, until it returns false. It keeps what `look` has captured until
// then: capture calls weakly.
void LookAtCall(std::function<bool()> look);

}  // namespace shardmesh
