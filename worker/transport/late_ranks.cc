#include "worker/transport/late_ranks.h"

namespace shardmesh {

std::vector<int> WhoHoldsUp(int self, const std::vector<std::vector<int>>& waits_for) {
  std::vector<bool> reached(waits_for.size(), false);
  std::vector<int> ahead = {self};
  while (!ahead.empty()) {
    const int rank = ahead.back();
    ahead.pop_back();
    if (reached[rank]) continue;
    reached[rank] = true;
    ahead.insert(ahead.end(), waits_for[rank].begin(), waits_for[rank].end());
  }
  std::vector<int> silent;
  for (int rank = 0; rank < static_cast<int>(waits_for.size()); ++rank) {
    if (rank != self && reached[rank] && waits_for[rank].empty()) silent.push_back(rank);
  }
  return silent.empty() ? waits_for[self] : silent;
}

}  // namespace shardmesh
