// Whether CUDA can be used here. Thread-safe.
#pragma once

#include "absl/status/status.h"

namespace shardmesh {

// OK when this build has CUDA, a driver answers and there is a device. Unimplemented: built without CUDA
// (--config=cuda). Unavailable: no driver or no device; the driver's words are in the message.
absl::Status CudaAvailable();

}  // namespace shardmesh
