// The optimizers' element rules, once for every number type: what one element's gradient does to its weight and states.
// Formulas and order as torch.optim has them (2.13), with multiply-adds rounded once; step-dependent factors are in the
// scalars (core/job/optimizer.h). The gradient has been summed, scaled, clipped and, with coupled weight decay, been
// given the weight's share before. Pure functions, thread-safe.
#pragma once

#include "core/job/optimizer.h"
#include "kernels/rules/adamw.h"
#include "kernels/rules/number.h"

namespace shardmesh {

// StepScalars in a number type, so that a loop broadcasts them once.
template <class Number>
struct StepConstants : AdamWConstants<Number> {
  SHARDMESH_RULE explicit StepConstants(const StepScalars& s)
      : AdamWConstants<Number>(s),
        momentum(s.momentum),
        one_minus_dampening(s.one_minus_dampening),
        nesterov(s.nesterov) {}

  Number momentum, one_minus_dampening, nesterov;
};

// torch.optim.SGD without momentum: w' = w - lr g.
template <class Number>
SHARDMESH_RULE Number SgdUpdate(const StepConstants<Number>& c, Number weight, Number gradient) {
  return MulAdd(c.neg_step_size, gradient, weight * c.decay);
}

// With momentum: b' = momentum b + (1 - dampening) g (b' = g at the first step: its scalars are 0 and 1), w' = w - lr
// b', or with Nesterov w' = w - lr (g + momentum b').
template <bool kNesterov, class Number>
SHARDMESH_RULE Number MomentumUpdate(const StepConstants<Number>& c, Number weight, Number gradient, Number& buffer) {
  buffer = MulAdd(c.momentum, buffer, c.one_minus_dampening * gradient);
  const Number direction = kNesterov ? MulAdd(c.nesterov, buffer, gradient) : buffer;
  return MulAdd(c.neg_step_size, direction, weight * c.decay);
}

// m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g g, w' = decay w - step m' / (sqrt(v') / sqrt(bias2) +
// eps). Adam has decay 1; AdamW (Loshchilov, Hutter, 2019) 1 - lr weight_decay.
template <class Number>
SHARDMESH_RULE Number AdamUpdate(const StepConstants<Number>& c, Number weight, Number gradient, Number& m, Number& v) {
  return AdamWUpdate(c, weight, gradient, m, v);
}

// AMSGrad (Reddi, Kale, Kumar, ICLR 2018): the largest second moment so far in place of the last.
template <class Number>
SHARDMESH_RULE Number AmsgradUpdate(const StepConstants<Number>& c, Number weight, Number gradient, Number& m,
                                    Number& v, Number& largest) {
  m = MulAdd(c.beta1, m, c.one_minus_beta1 * gradient);
  v = MulAdd(c.beta2, v, (c.one_minus_beta2 * gradient) * gradient);
  largest = Max(largest, v);
  const Number denominator = MulAdd(Sqrt(largest), c.inv_sqrt_bias2, c.eps);
  return MulAdd(c.neg_step_size, Divide(m, denominator), weight * c.decay);
}

// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023): w' = decay w - lr sign(beta1 m + (1-beta1)
// g), m' = beta2 m + (1 - beta2) g. The sign of 0 is 0.
template <class Number>
SHARDMESH_RULE Number LionUpdate(const StepConstants<Number>& c, Number weight, Number gradient, Number& m) {
  const Number direction = MulAdd(c.beta1, m, c.one_minus_beta1 * gradient);
  m = MulAdd(c.beta2, m, c.one_minus_beta2 * gradient);
  const Number zero(0.0f);
  const Number sign = Select(zero < direction, Number(1.0f), Select(direction < zero, Number(-1.0f), zero));
  return MulAdd(c.neg_step_size, sign, weight * c.decay);
}

// Each as a type: how many states it has, and what moves them on and returns the new weight.
struct SgdRule {
  static constexpr int kStates = 0;
  template <class Number>
  SHARDMESH_RULE static Number Update(const StepConstants<Number>& c, Number weight, Number gradient, Number (&)[3]) {
    return SgdUpdate(c, weight, gradient);
  }
};

template <bool kNesterov>
struct MomentumRule {
  static constexpr int kStates = 1;
  template <class Number>
  SHARDMESH_RULE static Number Update(const StepConstants<Number>& c, Number weight, Number gradient,
                                      Number (&states)[3]) {
    return MomentumUpdate<kNesterov>(c, weight, gradient, states[0]);
  }
};

struct AdamRule {
  static constexpr int kStates = 2;
  template <class Number>
  SHARDMESH_RULE static Number Update(const StepConstants<Number>& c, Number weight, Number gradient,
                                      Number (&states)[3]) {
    return AdamUpdate(c, weight, gradient, states[0], states[1]);
  }
};

struct AmsgradRule {
  static constexpr int kStates = 3;
  template <class Number>
  SHARDMESH_RULE static Number Update(const StepConstants<Number>& c, Number weight, Number gradient,
                                      Number (&states)[3]) {
    return AmsgradUpdate(c, weight, gradient, states[0], states[1], states[2]);
  }
};

struct LionRule {
  static constexpr int kStates = 1;
  template <class Number>
  SHARDMESH_RULE static Number Update(const StepConstants<Number>& c, Number weight, Number gradient,
                                      Number (&states)[3]) {
    return LionUpdate(c, weight, gradient, states[0]);
  }
};

// Calls visit(rule) with the optimizer's; any but Muon.
template <class Visit>
SHARDMESH_RULE void WithOptimizer(const OptimizerHyper& hyper, const Visit& visit) {
  switch (hyper.kind) {
    case OptimizerKind::kSgd:
      if (hyper.momentum == 0) return visit(SgdRule());
      return hyper.nesterov ? visit(MomentumRule<true>()) : visit(MomentumRule<false>());
    case OptimizerKind::kLion:
      return visit(LionRule());
    default:
      return hyper.amsgrad ? visit(AmsgradRule()) : visit(AdamRule());
  }
}

}  // namespace shardmesh
