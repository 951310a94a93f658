// What a device does in another way than the rules are written (kernels/cuda/warp_pieces.h, warp_codes.h), against the
// rules on the same device. Only in builds with --config=cuda. Tests only.
#pragma once

#include <cstdint>

namespace shardmesh {

enum class WarpNumbers {
  kSqrt,          // of every float
  kDivide,        // of 2^32 pairs: exponents near each other, and any
  kEncodeFirst,   // every float as a first moment of fp8x32
  kEncodeSecond,  // every float that is not negative as a second one, each with a draw
  kDecode,        // every code of both
};

// How many bits differ from the rule's; a NaN is a NaN. Returns null on success, else the CUDA runtime's description of
// the error (static storage).
const char* CountWarpDifferences(WarpNumbers numbers, uint64_t* differences);

}  // namespace shardmesh
