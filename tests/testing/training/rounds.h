// Rounds: draws from a list without an end. Of each round only the order is random, so that a short run has everything,
// and the same seed gives the same on every machine, as std::uniform_int_distribution and std::shuffle do not.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace shardmesh::testing {

template <typename Kind>
class Rounds {
 public:
  Rounds(std::vector<Kind> round, uint32_t seed) : round_(std::move(round)), random_(seed) {}

  Kind Next() {
    if (left_.empty()) {
      left_ = round_;
      for (size_t i = left_.size() - 1; i > 0; --i) std::swap(left_[i], left_[Below(static_cast<int>(i) + 1)]);
    }
    Kind next = left_.back();
    left_.pop_back();
    return next;
  }
  int Below(int limit) { return static_cast<int>(random_() % static_cast<uint32_t>(limit)); }

 private:
  const std::vector<Kind> round_;
  std::mt19937 random_;
  std::vector<Kind> left_;  // of this round
};

}  // namespace shardmesh::testing
