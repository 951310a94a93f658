// Incarnations: the numbers by which the incarnations of one worker's name are told apart. Each incarnation's number is
// larger than the last one's. It is the wall time at the start in nanoseconds, or one more than the last incarnation's
// number, whichever is larger: so numbers go on growing when somebody sets the wall clock back. Pure functions,
// thread-safe.
//
// Who refuses a number says which one it would take (WithNextIncarnation), and the worker takes that one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace shardmesh {

// What is larger is no number of an incarnation: as a wall time this is in the year 2116.
inline constexpr int64_t kMaxIncarnation = int64_t{1} << 62;

// `a` + `b`, both not negative; the largest number when that is too much.
inline int64_t AddSaturated(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return a > kMost - b ? kMost : a + b;
}

// Of an incarnation that begins at `wall`; `last`: the number of the incarnation before it, 0: none is known.
inline int64_t NextIncarnation(absl::Time wall, int64_t last) {
  return std::max<int64_t>({1, std::min(absl::ToUnixNanos(wall), kMaxIncarnation), AddSaturated(last, 1)});
}

// In the trailing metadata of a refused call, as a decimal number.
inline constexpr char kNextIncarnationKey[] = "shardmesh-next-incarnation";

// `status`, with the number that would not be refused.
inline absl::Status WithNextIncarnation(absl::Status status, int64_t next) {
  if (!status.ok() && next > 0) status.SetPayload(kNextIncarnationKey, absl::Cord(absl::StrCat(next)));
  return status;
}

// Nullopt: the status says none.
inline std::optional<int64_t> NextIncarnationOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kNextIncarnationKey);
  int64_t next = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &next) || next <= 0) return std::nullopt;
  return next;
}

}  // namespace shardmesh
