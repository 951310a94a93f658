#include "worker/job/second_look.h"

#include "absl/time/time.h"
#include "local/process/process_end.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kEndsAfterHangingUp = absl::Milliseconds(200);  // at most
}  // namespace

SecondLook::SecondLook(ControlBlock& control, pid_t process)
    : control_(control), process_(process), lives_(!HasEnded(process)) {
  if (lives_) control_.looks_again.fetch_add(1);
}

SecondLook::~SecondLook() {
  if (lives_ && EndsWithin(process_, kEndsAfterHangingUp)) control_.looks_again.fetch_sub(1);
}

}  // namespace shardmesh
