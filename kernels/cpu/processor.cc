#include "kernels/cpu/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace shardmesh {
namespace {

bool AskProcessor() {
#if defined(__x86_64__)
  // The compiler's own question includes the operating system's part, but not every compiler knows F16C.
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul") &&
         __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
#else
  return false;
#endif
}

}  // namespace

bool SimdSupported() {
  static const bool supported = AskProcessor();
  return supported;
}

const char* BestImplementation() { return SimdSupported() ? "simd" : "reference"; }

}  // namespace shardmesh
