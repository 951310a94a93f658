// Owners of whole matrices, so that no worker's step takes much longer than another's.
// Pure and thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace shardmesh {

struct OwnedMatrix {
  double cost = 0;  // of its step, in any unit
  int64_t num_elements = 0;
};

// The arithmetic of one Newton-Schulz iteration on an r x c matrix, in multiply-adds: s * s * (2 l + s) with
// s = min(r, c), l = max(r, c) (Jordan et al., "Muon", 2024: A = X X^T, B = b A + c A A, X = a X + B X).
double NewtonSchulzCost(int64_t rows, int64_t columns);

// The owner of each matrix, in [0, num_owners): longest processing time first (Graham, 1969: the largest load is at
// most 4/3 of the best possible), among the owners that stay below 1.3 times the mean number of elements with it where
// there are any. Ties go to the lower index, so the result is a function of the arguments alone. REQUIRES: num_owners
// >= 1.
std::vector<int32_t> BalanceOwners(absl::Span<const OwnedMatrix> matrices, int64_t num_owners);

}  // namespace shardmesh
