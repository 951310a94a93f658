#include "core/layout/owner_balance.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

namespace shardmesh {
namespace {

constexpr double kElementsCap = 1.3;
// Owners looked at for one that is below the cap: more would make the cost grow with their number.
constexpr int kMaxCandidates = 64;

}  // namespace

double NewtonSchulzCost(int64_t rows, int64_t columns) {
  const auto s = static_cast<double>(std::min(rows, columns)), l = static_cast<double>(std::max(rows, columns));
  return s * s * (2 * l + s);
}

std::vector<int32_t> BalanceOwners(absl::Span<const OwnedMatrix> matrices, int64_t num_owners) {
  // More owners than matrices: the others stay idle.
  const auto used = static_cast<int32_t>(std::min<int64_t>(num_owners, static_cast<int64_t>(matrices.size())));
  std::vector<int32_t> order(matrices.size()), owners(matrices.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return matrices[a].cost > matrices[b].cost; });
  double total = 0;
  for (const OwnedMatrix& matrix : matrices) total += static_cast<double>(matrix.num_elements);
  const double cap = used == 0 ? 0 : kElementsCap * total / used;
  std::vector<int64_t> elements(used);
  std::set<std::pair<double, int32_t>> loads;  // (cost, owner), the least loaded first
  for (int32_t i = 0; i < used; ++i) loads.insert({0.0, i});
  for (const int32_t matrix : order) {
    auto chosen = loads.begin();
    int looked_at = 0;
    for (auto it = loads.begin(); it != loads.end() && looked_at < kMaxCandidates; ++it, ++looked_at) {
      if (static_cast<double>(elements[it->second] + matrices[matrix].num_elements) > cap) continue;
      chosen = it;
      break;
    }
    const auto [cost, owner] = *chosen;
    loads.erase(chosen);
    loads.insert({cost + matrices[matrix].cost, owner});
    elements[owner] += matrices[matrix].num_elements;
    owners[matrix] = owner;
  }
  return owners;
}

}  // namespace shardmesh
