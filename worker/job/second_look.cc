#include "worker/job/second_look.h"

#include "absl/time/time.h"
#include "local/process_end.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kEndsAfterHangingUp = absl::Milliseconds(200);  // at most
}  // namespace

SecondLook::SecondLook(ControlPage& page, pid_t process) : page_(page), process_(process), lives_(!HasEnded(process)) {
  if (lives_) page_.looks_again.fetch_add(1);
}

SecondLook::~SecondLook() {
  if (lives_ && EndsWithin(process_, kEndsAfterHangingUp)) page_.looks_again.fetch_sub(1);
}

}  // namespace shardmesh
