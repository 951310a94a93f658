#include "worker/gradient_norm.h"

#include <cmath>
#include <vector>

#include "core/reduction.h"

namespace shardmesh {

double GradientNorm(const JobSpec& job, const Plan& plan, const float* sums) {
  std::vector<float> roots;
  for (size_t t = 0; t < job.parameters.size(); ++t) {
    const Placement& at = plan.placements()[t];
    if (!job.parameters[t].tied_to.empty() || job.parameters[t].frozen || at.num_elements == 0) continue;
    const float* first = sums + plan.buckets()[at.bucket].first_block + at.offset / kBlockElements;
    const int64_t blocks = (at.num_elements + kBlockElements - 1) / kBlockElements;
    roots.push_back(TreeSum<float>(static_cast<int>(blocks), [&](int i) { return first[i]; }));
  }
  if (roots.empty()) return 0;
  const auto root_of = [&](int i) { return roots[static_cast<size_t>(i)]; };
  return std::sqrt(static_cast<double>(TreeSum<float>(static_cast<int>(roots.size()), root_of)));
}

}  // namespace shardmesh
