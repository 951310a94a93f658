// Comma-separated lists, as flags have them. Pure and thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"

namespace shardmesh {

// The parts between the commas; none of an empty text.
inline std::vector<std::string> SplitList(absl::string_view text) {
  if (text.empty()) return {};
  return absl::StrSplit(text, ',');
}

// The whole numbers between the commas, at least one; nullopt when the text has any other form, or a number is beyond
// T.
template <typename T>
std::optional<std::vector<T>> ParseNumbers(absl::string_view text) {
  std::vector<T> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(part, &numbers.emplace_back())) return std::nullopt;
  }
  return numbers;
}

// Those numbers as ranks.
inline std::optional<std::vector<Rank>> ParseRanks(absl::string_view text) {
  const std::optional<std::vector<int32_t>> numbers = ParseNumbers<int32_t>(text);
  if (!numbers.has_value()) return std::nullopt;
  std::vector<Rank> ranks;
  for (const int32_t number : *numbers) ranks.push_back(Rank(number));
  return ranks;
}

}  // namespace shardmesh
