// AbsentWeights: what the parameter window shows of weights that are not there, with bucket residency. Zeros would pass
// for weights in whatever reads them without acquiring them: a penalty, an average of models, a norm. So all bits are
// set, which is NaN in every format but integers, up to the end of the page in which a parameter begins: the other
// pages stay given back. Immutable, thread-safe.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/job/plan.h"

namespace shardmesh {

class AbsentWeights {
 public:
  explicit AbsentWeights(const Plan& plan);

  // Of a bucket whose pages were given back. REQUIRES: `window` is mapped for writing.
  void Show(int bucket, char* window) const;
  // Bytes of the pages that Show touches.
  int64_t PageBytes(int bucket) const;

 private:
  std::vector<std::vector<std::pair<int64_t, int64_t>>> spans_;  // by bucket: [begin, end) in the window, ascending
};

}  // namespace shardmesh
