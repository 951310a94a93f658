// SHARDMESH_HOST_DEVICE marks a function that g++ compiles for the CPU and nvcc for both the CPU and the GPU.
// Such a function is an element rule: it exists once, so that both machines compute the same bits.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SHARDMESH_HOST_DEVICE __host__ __device__
#else
#define SHARDMESH_HOST_DEVICE
#endif

// The same for a function on the path of every element, which the optimizer must not leave as a call.
#define SHARDMESH_RULE SHARDMESH_HOST_DEVICE inline __attribute__((always_inline))

namespace shardmesh {

// x >> kBits as a function, so that a rule can be written for vectors too, whose shifts take a constant.
template <int kBits>
SHARDMESH_RULE uint32_t ShiftRight(uint32_t x) {
  return x >> kBits;
}
template <int kBits>
SHARDMESH_RULE uint64_t ShiftRight(uint64_t x) {
  return x >> kBits;
}

}  // namespace shardmesh
