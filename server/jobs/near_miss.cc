#include "server/jobs/near_miss.h"

#include <algorithm>
#include <array>

#include "absl/strings/match.h"

namespace shardmesh {
namespace {

constexpr int kMaxEdits = 2;
constexpr size_t kMaxBytes = 256;

// Levenshtein's distance of a and b, or kMaxEdits + 1 as soon as it must be more. O(|a| * (2 * kMaxEdits + 1)).
int BoundedDistance(absl::string_view a, absl::string_view b) {
  const int rows = static_cast<int>(a.size()), columns = static_cast<int>(b.size());
  if (std::abs(rows - columns) > kMaxEdits) return kMaxEdits + 1;
  std::array<int, kMaxBytes + 1> above, current;
  for (int j = 0; j <= columns; ++j) above[j] = std::min(j, kMaxEdits + 1);
  for (int i = 1; i <= rows; ++i) {
    const int low = std::max(1, i - kMaxEdits), high = std::min(columns, i + kMaxEdits);
    current.fill(kMaxEdits + 1);
    if (i <= kMaxEdits) current[0] = i;
    int best = current[0];
    for (int j = low; j <= high; ++j) {
      current[j] = std::min({above[j] + 1, current[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      best = std::min(best, current[j]);
    }
    if (best > kMaxEdits) return kMaxEdits + 1;
    above = current;
  }
  return std::min(above[columns], kMaxEdits + 1);
}

// True when `tail` is `whole` without some leading segments.
bool IsTail(absl::string_view tail, absl::string_view whole) {
  return whole.size() > tail.size() && absl::EndsWith(whole, tail) && whole[whole.size() - tail.size() - 1] == '.';
}

}  // namespace

std::string NearestName(absl::string_view wanted, const std::vector<ParameterSpec>& parameters) {
  if (wanted.size() > kMaxBytes) return "";
  std::string nearest;
  int best = kMaxEdits + 1;
  for (const ParameterSpec& p : parameters) {
    if (p.name.size() > kMaxBytes) continue;
    const int distance = IsTail(p.name, wanted) || IsTail(wanted, p.name) ? kMaxEdits : BoundedDistance(wanted, p.name);
    if (distance < best) {
      best = distance;
      nearest = p.name;
    }
  }
  return nearest;
}

}  // namespace shardmesh
