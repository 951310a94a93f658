#include "worker/transport/group_signs.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {

void GroupSigns::Show(uint64_t point) {
  // A rank that cannot say where it is, is taken for missing: nothing else can be done about it here.
  set_(absl::StrCat(name_, "/at/", rank_), absl::StrCat(point)).IgnoreError();
}

std::vector<int> GroupSigns::Missing(uint64_t point) const {
  std::vector<int> missing;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto at = get_(absl::StrCat(name_, "/at/", peer), absl::ZeroDuration());
    uint64_t shown = 0;
    if (!at.ok() || !absl::SimpleAtoi(*at, &shown) || shown < point) missing.push_back(peer);
  }
  return missing;
}

bool GroupSigns::End(absl::string_view reason) {
  Look();
  {
    MutexLock lock(mu_);
    if (ended_) return false;
    ended_ = true;
    reason_ = std::string(reason);
  }
  // Peers that cannot be told end by their time limits.
  set_(absl::StrCat(name_, "/ended"), reason).IgnoreError();
  return true;
}

void GroupSigns::Look() {
  if (ended()) return;
  const auto reason = get_(absl::StrCat(name_, "/ended"), absl::ZeroDuration());
  if (!reason.ok()) return;
  MutexLock lock(mu_);
  if (!ended_) reason_ = *reason;
  ended_ = true;
}

bool GroupSigns::ended() const {
  MutexLock lock(mu_);
  return ended_;
}

std::string GroupSigns::reason() const {
  MutexLock lock(mu_);
  return reason_;
}

}  // namespace shardmesh
