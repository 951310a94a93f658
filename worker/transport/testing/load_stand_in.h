// The stand-in (nccl_stand_in.h), as a test loads it.
#pragma once

#include "local/device/shared_library.h"
#include "worker/transport/testing/nccl_stand_in.h"

namespace shardmesh {

// Where it lies, from where tests run.
inline constexpr char kStandInPath[] = "worker/transport/libnccl_stand_in.so";

inline StandIn& TheStandIn() {
  static StandIn& stand_in = *[] {
    const auto library = SharedLibrary::Open({kStandInPath});
    return reinterpret_cast<StandInEntry>(library.value().Find(kStandInEntry))();
  }();
  return stand_in;
}

}  // namespace shardmesh
