// The names of optimizer state in PyTorch's flattened state dicts (torch/distributed/checkpoint/state_dict.py, the
// option flatten_optimizer_state_dict), with the parameter's name in the middle:
//   [prefix.]state.PARAMETER.STATE            optim.state.layers.0.w.exp_avg
//   [prefix.]param_groups.PARAMETER.FIELD     optim.param_groups.layers.0.w.lr
// A prefix is what an application put before them, such as optim or optimizer; those that may occur are given.
//
// The last segment is the state's name. Of a state that is itself a dict ("state.w.factors.0") the outer names count to
// the parameter's here: the name alone does not tell them apart. The canonical form keeps them all the same, unless
// they are named like wrappers.
//
// Pure functions, thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/names/names.h"

namespace shardmesh {

enum class OptimizerNameKind { kState, kParamGroup };

struct OptimizerName {
  std::string prefix;  // "" when there is none
  OptimizerNameKind kind = OptimizerNameKind::kState;
  std::string parameter;
  std::string state;  // the state's name (exp_avg), or the field's of the parameter group (lr)

  // The name that parses to this.
  std::string ToString() const;
};

// InvalidArgument: not a name (core/names/names.h) of the form above, or a prefix that is none: names, without a
// segment `state` or `param_groups`.
absl::StatusOr<OptimizerName> ParseOptimizerName(absl::string_view name, const std::vector<std::string>& prefixes = {});

// `raw` with its parameter's name made canonical by `parameters`, whose rules are about parameters' names alone: root
// wrappers stand at the head of the parameter's name. Everything else is kept. Errors as ParseOptimizerName.
absl::StatusOr<std::string> CanonicalOptimizerName(absl::string_view raw, const Canonicalizer& parameters,
                                                   const std::vector<std::string>& prefixes = {});

}  // namespace shardmesh
