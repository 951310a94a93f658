#include "tests/testing/training/reference.h"

#include <string>
#include <vector>

#include "worker/testing/numerics_oracle.h"

namespace shardmesh::testing {

Learnt ReferenceOf(const JobSpec& spec, int64_t steps, Group* group) {
  OracleInput input;
  input.initial = InitialValue;
  input.gradient = GradientValue;
  input.rates = [](int group, int64_t step) { return LearningRate(step, group); };
  if (spec.token_weights) {
    input.tokens = TokensOf;
    input.gradient = [](Format format, int slot, int64_t step, int tensor, int64_t element) {
      return TokensOf(slot, step) == 0 ? 0.0f : testing::GradientValue(format, slot, step, tensor, element);
    };
  }
  NumericsOracle oracle(spec, input, group);
  for (int64_t step = 1; step <= steps; ++step) oracle.RunStep(step);
  Learnt learnt;
  learnt.step = steps;
  learnt.digest = oracle.Digest();
  for (int t = 0; t < static_cast<int>(spec.parameters.size()); ++t) {
    const std::vector<char> bytes = oracle.Stored(spec.StorageOf(t));
    learnt.weights[spec.parameters[t].name] = std::string(bytes.begin(), bytes.end());
  }
  return learnt;
}

}  // namespace shardmesh::testing
