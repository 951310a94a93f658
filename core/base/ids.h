// Strong ids: integers that cannot be mixed up. A Step is not a Rank, and the compiler says so.
// Values, no invariants; comparable, hashable, printable with .value().
#pragma once

#include <cstdint>
#include <utility>

namespace shardmesh {

template <typename Tag, typename T>
class StrongId {
 public:
  using Value = T;
  constexpr StrongId() = default;
  constexpr explicit StrongId(T value) : value_(value) {}
  constexpr T value() const { return value_; }
  constexpr StrongId next() const { return StrongId(value_ + 1); }

  friend constexpr bool operator==(StrongId a, StrongId b) { return a.value_ == b.value_; }
  friend constexpr bool operator!=(StrongId a, StrongId b) { return a.value_ != b.value_; }
  friend constexpr bool operator<(StrongId a, StrongId b) { return a.value_ < b.value_; }
  friend constexpr bool operator>(StrongId a, StrongId b) { return a.value_ > b.value_; }
  friend constexpr bool operator<=(StrongId a, StrongId b) { return a.value_ <= b.value_; }
  friend constexpr bool operator>=(StrongId a, StrongId b) { return a.value_ >= b.value_; }
  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }

 private:
  T value_ = 0;
};

using Rank = StrongId<struct RankTag, int32_t>;    // a member's place in a job's mesh, 0 .. ranks-1
using Slot = StrongId<struct SlotTag, int32_t>;    // a gradient contribution of a step, 0 .. slots-1
using Step = StrongId<struct StepTag, int64_t>;    // optimizer step; 0 = the initial weights, the first step is 1
using Epoch = StrongId<struct EpochTag, int64_t>;  // one composition of a job's members
using Incarnation =
    StrongId<struct IncarnationTag, int64_t>;  // one incarnation of a worker process: nanoseconds at its start

}  // namespace shardmesh
