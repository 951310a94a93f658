// Which values weights and optimizer states may have in storage, as they are stored: what a step can compute with.
//
//   weights          finite, and what their format holds of them too; frozen ones may be anything (masks of -inf), but
//                    not in nf4, where one that is not finite makes the whole tensor NaN
//   states           finite; second moments (exp_avg_sq, max_exp_avg_sq) not below 0
//   scales           finite, not below 0, and so that no code under them is infinite
//   remainders, codes of int8, nf4, dyn8, dyn4 and UE5M3, which have no other values: anything
//
// Whatever comes into storage from outside goes through this: what a checkpoint's files hold, and what `shardctl adopt`
// lays out. Initial weights come as fp32, and are checked by LargestStorable before they are rounded. What a worker
// gives another one of the same job is not checked again: a job that trains moves as it is.
//
// Values and pure functions, thread-safe. A check reads memory once, at the speed of a sum.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/job/job.h"

namespace shardmesh {

// What the entries of one part of a tensor (its codes, or its remainders or scales) may be.
struct StoredRule {
  enum class Entry { kAny, kFp32, kBf16, kE4M3 };
  Entry entry = Entry::kAny;
  bool negative = true;       // it may be below 0
  uint32_t largest_bits = 0;  // of the magnitude, as fp32

  int64_t entry_bytes() const { return entry == Entry::kFp32 ? 4 : entry == Entry::kBf16 ? 2 : 1; }
};

StoredRule RuleOfWeights(WeightFormat format, bool extra);
StoredRule RuleOfStates(StateFormat format, bool extra, bool is_signed);
// stream: 0 the weights, 1 to 3 the states. REQUIRES: spec.Validate() is OK, and the parameter is not tied.
StoredRule RuleOf(const JobSpec& spec, int tensor, int stream, bool extra);

// The largest fp32 magnitude that stays finite in a format: weights above it become infinite where they are stored.
float LargestStorable(WeightFormat format);
// Whether weights have to be finite: those that are trained, and those in nf4.
bool MustBeFinite(WeightFormat format, bool frozen);

struct BadEntry {
  int64_t index = 0;
  float value = 0;
};
// The first entry that the rule refuses; nothing: there is none. `data` needs no alignment.
std::optional<BadEntry> FindBadEntry(const StoredRule& rule, const void* data, int64_t num_bytes);

// "w.exp_avg_sq: entry 7 is -1; ..." `part`: its name in files (checkpoint/stored_files.h). `first`: the index, in the
// whole part, of the entry with index 0.
std::string BadEntryText(const std::string& part, const StoredRule& rule, const BadEntry& bad, int64_t first);

}  // namespace shardmesh
