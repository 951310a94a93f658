#include "worker/step/gradient_norm.h"

#include <cmath>

#include "core/base/reduction.h"

namespace shardmesh {

namespace {

// The tensors that are counted, one after the other.
class CountedTensors {
 public:
  explicit CountedTensors(const JobSpec& job, const Plan& plan) : job_(job), plan_(plan) {}

  bool IsCounted(size_t t) const {
    const ParameterSpec& p = job_.parameters[t];
    return p.tied_to.empty() && !p.frozen && plan_.placements()[t].num_elements > 0;
  }
  int Count() const {
    int count = 0;
    for (size_t t = 0; t < job_.parameters.size(); ++t) count += IsCounted(t);
    return count;
  }
  // REQUIRES: fewer than Count() were taken.
  const Placement& Next() {
    while (!IsCounted(next_)) ++next_;
    return plan_.placements()[next_++];
  }

 private:
  const JobSpec& job_;
  const Plan& plan_;
  size_t next_ = 0;
};

// TreeSum, cut where its count ends.
float SumOfBlocks(const float* first, int64_t blocks) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (blocks <= kMost) return TreeSum<float>(static_cast<int>(blocks), [first](int i) { return first[i]; });
  int64_t left = kMost;
  while (left < blocks - left) left *= 2;
  return SumOfBlocks(first, left) + SumOfBlocks(first + left, blocks - left);
}

}  // namespace

double GradientNorm(const JobSpec& job, const Plan& plan, const float* sums) {
  CountedTensors tensors(job, plan);
  const int count = tensors.Count();
  if (count == 0) return 0;
  const auto sum_of_next = [&](int) {  // TreeSum asks for its leaves in order, each once
    const Placement& at = tensors.Next();
    const float* first = sums + plan.buckets()[at.bucket].first_block + at.offset / kBlockElements;
    return SumOfBlocks(first, (at.num_elements + kBlockElements - 1) / kBlockElements);
  };
  return std::sqrt(static_cast<double>(TreeSum<float>(count, sum_of_next)));
}

}  // namespace shardmesh
