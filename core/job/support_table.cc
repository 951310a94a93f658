#include "core/job/support_table.h"

#include "absl/strings/str_cat.h"

namespace shardmesh {

absl::Status CheckTogether(absl::string_view who, Feature first, Feature second) {
  for (const RefusedPair& pair : kRefusedPairs) {
    const bool same = (pair.first == first && pair.second == second) || (pair.first == second && pair.second == first);
    if (!same) continue;
    const std::string what = absl::StrCat(who, " ", RowOf(pair.first).job, " and ", RowOf(pair.second).job);
    const std::string why = absl::StrCat(": ", pair.because, "; ", pair.instead);
    if (pair.never) return absl::InvalidArgumentError(absl::StrCat(what, ", which cannot go together", why));
    return absl::UnimplementedError(absl::StrCat(what, ", which do not go together yet", why));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
