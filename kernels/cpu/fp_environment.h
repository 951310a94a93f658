// ScopedFpEnvironment: round to nearest, subnormals kept, no traps, while it lives; then what was before.
// Numeric entry points use it, since a caller's thread may have been set otherwise (PyTorch's flush-denormal,
// -ffast-math start-up code). It concerns the calling thread only. Call the arithmetic as a function that is not
// inlined: a compiler may move floating-point operations across the constructor.
#pragma once

#include <cfenv>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardmesh {

class ScopedFpEnvironment {
 public:
#if defined(__x86_64__)
  ScopedFpEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~ScopedFpEnvironment() { _mm_setcsr(saved_); }
#else
  ScopedFpEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedFpEnvironment() { std::fesetenv(&saved_); }
#endif
  ScopedFpEnvironment(const ScopedFpEnvironment&) = delete;
  ScopedFpEnvironment& operator=(const ScopedFpEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  // MXCSR: all exceptions masked, to nearest, no flush to zero, subnormal operands kept.
  static constexpr unsigned kDefault = 0x1F80;
  const unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace shardmesh
