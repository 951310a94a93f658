// Element rules: the arithmetic of the fused step, written once for every number type.
//
// A number type is float (the reference, and the CUDA kernel), or a vector of floats (kernels/simd8.h). It has
// operator+ and operator*, a constructor from float, and the functions MulAdd, Sqrt and Divide below. Every operation
// is one IEEE operation rounded to nearest, subnormals kept; nothing is contracted or reordered (-ffp-contract=off,
// -fmad=false), so every number type computes the same bits. The roundings to bf16 are in core/format.h, the draws in
// core/philox.h, the sum over slots in core/reduction.h. Pure functions, thread-safe.
#pragma once

#include <cmath>

#include "core/adamw.h"
#include "core/host_device.h"

namespace shardmesh {

// a * b + c, rounded once.
SHARDMESH_RULE float MulAdd(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

SHARDMESH_RULE float Sqrt(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

SHARDMESH_RULE float Divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// AdamWScalars in a number type, so that a loop broadcasts them once.
template <class Number>
struct AdamWConstants {
  SHARDMESH_RULE explicit AdamWConstants(const AdamWScalars& s)
      : beta1(s.beta1),
        one_minus_beta1(s.one_minus_beta1),
        beta2(s.beta2),
        one_minus_beta2(s.one_minus_beta2),
        inv_sqrt_bias2(s.inv_sqrt_bias2),
        eps(s.eps),
        decay(s.decay),
        neg_step_size(s.neg_step_size) {}

  Number beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, neg_step_size;
};

// AdamW's update (core/adamw.h): moves m and v on and returns the new weight in fp32, not yet rounded to its format.
//   m' = fma(beta1, m, (1-beta1) g)      v' = fma(beta2, v, ((1-beta2) g) g)
//   w' = fma(-step, m' / fma(sqrt(v'), 1/sqrt(bias2), eps), w (1 - lr wd))
// Exact square root and division: they hide behind memory traffic, approximations with a Newton step are slower.
template <class Number>
SHARDMESH_RULE Number AdamWUpdate(const AdamWConstants<Number>& c, Number weight, Number gradient, Number& m,
                                  Number& v) {
  m = MulAdd(c.beta1, m, c.one_minus_beta1 * gradient);
  v = MulAdd(c.beta2, v, (c.one_minus_beta2 * gradient) * gradient);
  const Number denominator = MulAdd(Sqrt(v), c.inv_sqrt_bias2, c.eps);
  return MulAdd(c.neg_step_size, Divide(m, denominator), weight * c.decay);
}

}  // namespace shardmesh
