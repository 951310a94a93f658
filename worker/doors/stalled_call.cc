#include "worker/doors/stalled_call.h"

#include <grpcpp/alarm.h>

#include <chrono>
#include <memory>
#include <utility>

namespace shardmesh {
namespace {

// Each is for one look: an alarm that is set within its own callback would replace that.
struct Look {
  grpc::Alarm alarm;
  std::function<bool()> look;

  static void Arm(std::function<bool()> look) {
    auto* const next = new Look{grpc::Alarm(), std::move(look)};
    gpr_timespec every = gpr_time_from_millis(absl::ToInt64Milliseconds(kStallLook), GPR_TIMESPAN);
    next->alarm.Set(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), every), [next](bool rang) {
      const std::unique_ptr<Look> self(next);
      if (rang && self->look()) Arm(std::move(self->look));
    });
  }
};

}  // namespace

void LookAtCall(std::function<bool()> look) { Look::Arm(std::move(look)); }

}  // namespace shardmesh
