// Damage: where silent corruption of a shard was found (pass_check.cc), in one word of the control block. The step in
// which it is found is not committed.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/job/job.h"

namespace shardmesh {

struct Damage {
  enum What : uint8_t { kNone = 0, kMemory = 1, kArithmetic = 2, kGradients = 3 };

  What what = kNone;
  int tensor = 0;
  int64_t element = 0;  // the first of the chunk that is in the tensor; a multiple of 64

  uint64_t Word() const {
    static_assert(kMaxParameters < (1 << 22) && kMaxJobElements / 64 <= (int64_t{1} << 40));
    return uint64_t{what} << 62 | static_cast<uint64_t>(tensor) << 40 | static_cast<uint64_t>(element / 64);
  }
  static Damage Of(uint64_t word) {
    return {What(word >> 62), static_cast<int>(word >> 40 & ((1 << 22) - 1)),
            static_cast<int64_t>(word & ((uint64_t{1} << 40) - 1)) * 64};
  }

  // For people; a change of a slot's gradients while a step reads them looks like arithmetic that errs.
  std::string ToString(const JobSpec& job) const {
    const std::string name = tensor < static_cast<int>(job.parameters.size()) ? job.parameters[tensor].name : "?";
    const char* const found =
        what == kMemory ? "memory of weights or states changed between two steps"
        : what == kArithmetic
            ? "the same step of weights and states gave two results; or a trainer wrote its slots meanwhile"
            : "gradients that were finite when they were declared are not any more: a process that was attached "
              "before writes them still";
    return absl::StrCat(
        found,
        ", in or behind element ", element, " of parameter \"", name, "\"");
  }
};

}  // namespace shardmesh
