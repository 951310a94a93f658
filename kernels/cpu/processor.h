// What this processor can run of the kernels. Thread-safe; the answers never change.
#pragma once

namespace shardmesh {

// Whether the processor, its operating system and this build have what the SIMD implementations need: the instruction
// sets of SIMD_COPTS (kernels/BUILD).
bool SimdSupported();

// The implementation that kernels choose by themselves: "simd" where it is supported, else "reference".
const char* BestImplementation();

}  // namespace shardmesh
