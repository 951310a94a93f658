#include "core/job/stored_values.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/format/format.h"
#include "core/format/gather_format.h"

namespace shardmesh {
namespace {

constexpr int64_t kBlock = 256;
constexpr float kLargestInt8 = 127, kLargestE4M3 = 448, kLargestUE5M3 = 61440;  // of a code
constexpr uint32_t kLargestBf16 = 0x7F7F0000, kRoundsToInfinity = 0x7F7F8000;   // the latter: ties to even

StoredRule Floats(StoredRule::Entry entry, bool negative, float largest = FLT_MAX) {
  return {entry, negative, FloatBits(largest)};
}

// So large that no code under it is infinite.
StoredRule Scales(StoredRule::Entry entry, float largest_code) {
  float largest = FLT_MAX / largest_code;
  while (!std::isfinite(largest * largest_code)) largest = std::nextafter(largest, 0.0f);
  return Floats(entry, /*negative=*/false, largest);
}

// One branch a block: the compiler turns the inner loop into vector code. Magnitudes compare as their bits do, and
// infinities and NaNs have the largest bits.
template <class Word>
int64_t FirstBad(const char* data, int64_t entries, Word largest, bool negative) {
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  const auto bad = [&](Word word) {
    const Word magnitude = static_cast<Word>(word & static_cast<Word>(~kSign));
    return static_cast<Word>((magnitude > largest) | ((!negative) & (word > kSign)));  // -0 is not below 0
  };
  Word block[kBlock];
  for (int64_t i = 0; i < entries; i += kBlock) {
    const int64_t in_block = std::min(kBlock, entries - i);
    std::memcpy(block, data + i * sizeof(Word), static_cast<size_t>(in_block) * sizeof(Word));
    Word any = 0;
    for (int64_t j = 0; j < in_block; ++j) any = static_cast<Word>(any | bad(block[j]));
    for (int64_t j = 0; any != 0 && j < in_block; ++j) {
      if (bad(block[j]) != 0) return i + j;
    }
  }
  return entries;
}

float ValueOfE4M3(uint8_t code) {
  const int magnitude = code & 0x7F, exponent = magnitude >> 3, mantissa = magnitude & 7;
  const float value = magnitude == 0x7F ? std::numeric_limits<float>::quiet_NaN()
                      : exponent == 0   ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code >= 0x80 ? -value : value;
}

template <class Word>
Word At(const char* data, int64_t entry) {
  Word word;
  std::memcpy(&word, data + entry * sizeof(Word), sizeof(Word));
  return word;
}

}  // namespace

StoredRule RuleOfWeights(WeightFormat format, bool extra) {
  using Entry = StoredRule::Entry;
  switch (format) {
    case WeightFormat::kFp32:
      return Floats(Entry::kFp32, true);
    case WeightFormat::kBf16:
    case WeightFormat::kBf16Sr:
    case WeightFormat::kBf16Plus16:
    case WeightFormat::kBf16Plus8Sr:
      return extra ? StoredRule() : Floats(Entry::kBf16, true);
    case WeightFormat::kInt8Row:
      return extra ? Scales(Entry::kFp32, kLargestInt8) : StoredRule();
    case WeightFormat::kNf4:  // levels up to 1
      return extra ? Scales(Entry::kFp32, 1) : StoredRule();
  }
  return {};
}

StoredRule RuleOfStates(StateFormat format, bool extra, bool is_signed) {
  using Entry = StoredRule::Entry;
  switch (format) {
    case StateFormat::kFp32:
      return Floats(Entry::kFp32, is_signed);
    case StateFormat::kBf16Sr:
      return Floats(Entry::kBf16, is_signed);
    case StateFormat::kDyn8:
    case StateFormat::kDyn4:  // levels up to 1
      return extra ? Scales(Entry::kFp32, 1) : StoredRule();
    case StateFormat::kFp8:
      return extra ? Scales(Entry::kFp32, kLargestE4M3) : Floats(Entry::kE4M3, is_signed, kLargestE4M3);
    case StateFormat::kFp8x32:
      if (extra) return Scales(Entry::kBf16, is_signed ? kLargestE4M3 : kLargestUE5M3);
      return is_signed ? Floats(Entry::kE4M3, true, kLargestE4M3) : StoredRule();
  }
  return {};
}

StoredRule RuleOf(const JobSpec& spec, int tensor, int stream, bool extra) {
  const ParameterSpec& parameter = spec.parameters[tensor];
  if (!MustBeFinite(parameter.format, parameter.frozen)) return {};
  if (stream == 0) return RuleOfWeights(parameter.format, extra);
  return RuleOfStates(parameter.states, extra, StateIsSigned(spec.group(parameter.group), stream - 1));
}

float LargestStorable(WeightFormat format) {
  return GatheredFormat(format) == Format::kFp32 ? FLT_MAX : FloatOfBits(kRoundsToInfinity - 1);
}

bool MustBeFinite(WeightFormat format, bool frozen) { return !frozen || format == WeightFormat::kNf4; }

std::optional<BadEntry> FindBadEntry(const StoredRule& rule, const void* data, int64_t num_bytes) {
  const auto* const bytes = static_cast<const char*>(data);
  const int64_t entries = num_bytes / rule.entry_bytes();
  int64_t at = entries;
  float value = 0;
  switch (rule.entry) {
    case StoredRule::Entry::kAny:
      return std::nullopt;
    case StoredRule::Entry::kFp32:
      at = FirstBad<uint32_t>(bytes, entries, rule.largest_bits, rule.negative);
      if (at < entries) value = FloatOfBits(At<uint32_t>(bytes, at));
      break;
    case StoredRule::Entry::kBf16:
      at = FirstBad<uint16_t>(bytes, entries, static_cast<uint16_t>(std::min(rule.largest_bits, kLargestBf16) >> 16),
                              rule.negative);
      if (at < entries) value = Bf16ToFloat(At<uint16_t>(bytes, at));
      break;
    case StoredRule::Entry::kE4M3:
      at = FirstBad<uint8_t>(bytes, entries, 0x7E, rule.negative);
      if (at < entries) value = ValueOfE4M3(At<uint8_t>(bytes, at));
      break;
  }
  if (at == entries) return std::nullopt;
  return BadEntry{at, value};
}

std::string BadEntryText(const std::string& part, const StoredRule& rule, const BadEntry& bad, int64_t first) {
  const float largest = FloatOfBits(rule.largest_bits);
  const bool limited = rule.entry != StoredRule::Entry::kE4M3 && largest < FLT_MAX;
  return absl::StrCat(part, ": entry ", first + bad.index, " is ", bad.value, "; it must be finite",
                      rule.negative ? "" : ", not below 0",
                      limited && bad.value > largest ? absl::StrCat(", at most ", largest) : "");
}

}  // namespace shardmesh
