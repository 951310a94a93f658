#include "worker/versions/publications.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "local/memory/futex.h"
#include "worker/versions/version_leases.h"

namespace shardmesh {
namespace {
constexpr size_t kPullsNamed = 8;  // of one publication in a message
}  // namespace

void Publications::ShowOn(VersionBoard* board, std::function<bool(int)> mapped) {
  board_ = board;
  mapped_ = std::move(mapped);
}

int64_t Publications::PinsOf(int buffer) const {
  int64_t pins = 0;
  for (const std::atomic<int64_t>& of_rank : control_->publications[buffer].pins) pins += of_rank.load();
  return pins;
}

bool Publications::IsLeased(int buffer) const {
  const int64_t since = now_() - absl::ToInt64Nanoseconds(kLeaseGrace);
  return std::any_of(std::begin(control_->leases), std::end(control_->leases), [&](const LeaseWords& lease) {
    const int64_t expires = lease.expires_nanos.load();
    return expires != 0 && expires > since && lease.buffer.load() == buffer;
  });
}

bool Publications::IsHeld(int buffer) const { return PinsOf(buffer) != 0 || IsLeased(buffer) || IsMapped(buffer); }

// Of those that were not tried and do not hold the newest version: the one with the oldest version, of those that have
// pages already if there is one.
int Publications::Best(uint32_t tried) const {
  const auto version = [&](int buffer) { return control_->publications[buffer].version_plus_one.load() & ~kTaken; };
  int newest = 0, best = -1;
  for (int b = 1; b < count(); ++b) newest = version(b) > version(newest) ? b : newest;
  for (int b = 0; b < count(); ++b) {
    if ((tried >> b & 1) != 0 || (b == newest && version(b) > 0 && count() > 1)) continue;
    const bool written = control_->publications[b].written.load() != 0;
    const bool better =
        best >= 0 &&
        (written != (control_->publications[best].written.load() != 0) ? written : version(b) < version(best));
    if (best < 0 || better) best = b;
  }
  return best;
}

bool Publications::Take(int buffer) {
  if (IsHeld(buffer)) return false;
  control_->publications[buffer].version_plus_one.fetch_or(kTaken);
  if (board_ != nullptr) board_->version_plus_one[buffer].store(0);
  if (!IsHeld(buffer)) return true;
  Keep(buffer);
  return false;
}

int Publications::Reserve(int64_t step) {
  if (job_->publish_every == kPublishOnDemand || step % job_->publish_every != 0) return -1;
  return ReserveAny();
}

int Publications::ReserveAny() {
  uint32_t tried = 0;
  for (int b = Best(tried); b >= 0; b = Best(tried)) {
    if (Take(b)) return b;
    tried |= uint32_t{1} << b;
  }
  control_->publications_refused.fetch_add(1);
  return -1;
}

void Publications::Keep(int buffer) {
  if (buffer < 0) return;
  const int64_t version = control_->publications[buffer].version_plus_one.fetch_and(~kTaken) & ~kTaken;
  if (board_ != nullptr) board_->version_plus_one[buffer].store(version);
}

void Publications::Show(int buffer, int64_t step) {
  control_->publications[buffer].written.store(1);
  control_->publications[buffer].version_plus_one.store(step + 1);
  if (board_ != nullptr) board_->version_plus_one[buffer].store(step + 1);
}

void Publications::Notify() {
  if (board_ != nullptr) FutexBump(board_->notifier);
}

std::vector<Step> Publications::Published() const {
  std::vector<Step> steps;
  for (int b = 0; b < count(); ++b) {
    const int64_t version = control_->publications[b].version_plus_one.load();
    if (version > 0 && version < kTaken) steps.push_back(Step(version - 1));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<int> Publications::Find(Step step) const {
  for (int b = 0; b < count(); ++b) {  // any step may be asked for
    if (control_->publications[b].version_plus_one.load() - 1 == step.value() && step.value() >= 0) return b;
  }
  return std::nullopt;
}

std::optional<int> Publications::Pin(Step step) {
  const std::optional<int> buffer = Find(step);
  if (!buffer.has_value()) return std::nullopt;
  PinHeld(*buffer);
  if (control_->publications[*buffer].version_plus_one.load() - 1 == step.value()) return buffer;
  Unpin(*buffer);
  return std::nullopt;
}

int Publications::num_held() const {
  int held = 0;
  for (int b = 0; b < count(); ++b) held += IsHeld(b);
  return held;
}

// Other workers of the host say in ListLeases who pulls through them.
std::string Publications::Pulls(int buffer, int64_t pins) const {
  std::vector<std::string> named = pullers_ ? pullers_(buffer) : std::vector<std::string>();
  const int64_t more = pins - static_cast<int64_t>(named.size());
  if (named.size() > kPullsNamed) named.resize(kPullsNamed);
  if (more > 0 && pullers_) named.push_back(absl::StrCat(more, " through other workers"));
  return absl::StrCat(pins, pins == 1 ? " pull" : " pulls", named.empty() ? "" : ": ", absl::StrJoin(named, ", "));
}

std::string Publications::Holders() const {
  std::vector<std::string> held;
  for (int b = 0; b < count(); ++b) {
    std::vector<std::string> by;
    if (const int64_t pins = PinsOf(b); pins != 0) by.push_back(Pulls(b, pins));
    if (IsLeased(b)) by.push_back("leased");
    if (IsMapped(b)) by.push_back("mapped by readers");
    if (by.empty()) continue;
    const int64_t version = control_->publications[b].version_plus_one.load() & ~kTaken;
    held.push_back(absl::StrCat("version ", version - 1, " (", absl::StrJoin(by, ", "), ")"));
  }
  return held.empty() ? "nobody" : absl::StrJoin(held, ", ");
}

void Publications::TakeOver() {
  for (int b = 0; b < count(); ++b) control_->publications[b].pins[self_.value()].store(0);
}

void Publications::KeepUnused(int in_use) {
  for (int b = 0; b < count(); ++b) {
    if (b != in_use) Keep(b);
  }
  Notify();
}

}  // namespace shardmesh
