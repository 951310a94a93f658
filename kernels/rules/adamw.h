// AdamW's element rule (core/job/adamw.h), once for every number type (kernels/rules/number.h). Pure, thread-safe.
#pragma once

#include "core/base/host_device.h"
#include "core/job/adamw.h"
#include "kernels/rules/number.h"

namespace shardmesh {

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

// AdamW's update (core/job/adamw.h): moves m and v on and returns the new weight in fp32, not yet rounded to its
//   format. m' = fma(beta1, m, (1-beta1) g)      v' = fma(beta2, v, ((1-beta2) g) g)
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
