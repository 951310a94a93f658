#include "core/job/stored_values.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/format/format.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::string name;
  StoredRule rule;
  float most_code = 1;  // of what the part's entries multiply; 1: they are the values themselves
  bool is_scale = false, is_signed = true, any = false;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (int f = 0; f <= static_cast<int>(WeightFormat::kInt8Row); ++f) {
    const auto format = static_cast<WeightFormat>(f);
    const std::string name(WeightFormatName(format));
    const bool rows = format == WeightFormat::kInt8Row;
    cases.push_back({name, RuleOfWeights(format, false), 1, false, true, rows});
    if (LayoutOf(format).extra.bytes > 0) {
      cases.push_back({name + " extra", RuleOfWeights(format, true), 127, rows, false, !rows});
    }
  }
  cases.push_back({"nf4", RuleOfWeights(WeightFormat::kNf4, false), 1, false, true, true});
  cases.push_back({"nf4 scales", RuleOfWeights(WeightFormat::kNf4, true), 1, true, false, false});
  for (int f = 0; f <= static_cast<int>(StateFormat::kFp8x32); ++f) {
    const auto format = static_cast<StateFormat>(f);
    for (const bool is_signed : {true, false}) {
      const std::string name = absl::StrCat(StateFormatName(format), is_signed ? " signed" : " unsigned");
      const bool map = format == StateFormat::kDyn8 || format == StateFormat::kDyn4;
      const bool ue5m3 = format == StateFormat::kFp8x32 && !is_signed;
      cases.push_back({name, RuleOfStates(format, false, is_signed), 1, false, is_signed, map || ue5m3});
      if (LayoutOf(format).extra.bytes > 0) {
        cases.push_back({name + " scales", RuleOfStates(format, true, is_signed),
                         map     ? 1.0f
                         : ue5m3 ? 61440
                                 : 448,
                         true, false, false});
      }
    }
  }
  return cases;
}

// What an entry means, by arithmetic of its own.
float ValueOf(const StoredRule& rule, uint32_t word) {
  switch (rule.entry) {
    case StoredRule::Entry::kFp32:
      return FloatOfBits(word);
    case StoredRule::Entry::kBf16:
      return Bf16ToFloat(static_cast<uint16_t>(word));
    case StoredRule::Entry::kE4M3: {
      const int exponent = (word >> 3) & 15, mantissa = word & 7;
      if (exponent == 15 && mantissa == 7) return kNan;
      const double value =
          exponent == 0 ? mantissa / 8.0 * std::pow(2, -6) : (1 + mantissa / 8.0) * std::pow(2, exponent - 7);
      return static_cast<float>((word & 0x80) != 0 ? -value : value);
    }
    case StoredRule::Entry::kAny:
      return 0;
  }
  return 0;
}

bool MayBeStored(const Case& one, uint32_t word) {
  if (one.any) return true;
  const float value = ValueOf(one.rule, word);
  return std::isfinite(value) && (one.is_signed || !(value < 0)) && std::isfinite(value * one.most_code);
}

uint32_t At(const std::string& bytes, int64_t entry, int64_t size) {
  uint32_t word = 0;
  std::memcpy(&word, bytes.data() + entry * size, static_cast<size_t>(size));
  return word;
}

// Random bits have every kind of value in them.
TEST(StoredValuesProperty, RandomBits_AreRefusedExactlyWhereNoJobMayHaveThem) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    const int64_t size = one.rule.entry_bytes();
    for (int round = 0; round < 400; ++round) {
      const auto entries = static_cast<int64_t>(random() % 700);
      std::string bytes(static_cast<size_t>(entries * size), '\0');
      // Mostly good, so that a bad one lies anywhere.
      for (int64_t i = 0; i < entries; ++i) {
        auto word = static_cast<uint32_t>(random());
        const bool keep = random() % 500 == 0;
        for (int tries = 0; !keep && !MayBeStored(one, word) && tries < 1000; ++tries)
          word = static_cast<uint32_t>(random());
        std::memcpy(&bytes[static_cast<size_t>(i * size)], &word, static_cast<size_t>(size));
      }
      int64_t first = 0;
      while (first < entries && MayBeStored(one, At(bytes, first, size))) ++first;
      const std::optional<BadEntry> bad = FindBadEntry(one.rule, bytes.data(), entries * size);
      ASSERT_EQ(bad.has_value(), first < entries);
      if (!bad.has_value()) continue;
      ASSERT_EQ(bad->index, first);
      const float value = ValueOf(one.rule, At(bytes, first, size));
      ASSERT_TRUE(bad->value == value || (std::isnan(bad->value) && std::isnan(value))) << bad->value << " " << value;
    }
  }
}

TEST(StoredValues, TheEdges) {
  const auto refused = [](const StoredRule& rule, float value) {
    const uint32_t fp32 = FloatBits(value);
    const uint16_t bf16 = static_cast<uint16_t>(fp32 >> 16);
    return rule.entry == StoredRule::Entry::kFp32 ? FindBadEntry(rule, &fp32, 4).has_value()
                                                  : FindBadEntry(rule, &bf16, 2).has_value();
  };
  const StoredRule weights = RuleOfWeights(WeightFormat::kFp32, false),
                   bf16 = RuleOfWeights(WeightFormat::kBf16, false);
  for (const float value : {FLT_MAX, -FLT_MAX, 0.0f, -0.0f, FLT_TRUE_MIN})
    EXPECT_FALSE(refused(weights, value)) << value;
  for (const float value : {kInf, -kInf, kNan, -kNan}) {
    EXPECT_TRUE(refused(weights, value)) << value;
    EXPECT_TRUE(refused(bf16, value)) << value;
  }
  const StoredRule squares = RuleOfStates(StateFormat::kFp32, false, /*is_signed=*/false);
  EXPECT_FALSE(refused(squares, -0.0f));
  EXPECT_FALSE(refused(squares, FLT_MAX));
  EXPECT_TRUE(refused(squares, -FLT_TRUE_MIN));
  const StoredRule scales = RuleOfStates(StateFormat::kFp8, true, true);
  EXPECT_FALSE(refused(scales, FLT_MAX / 450));
  EXPECT_TRUE(refused(scales, FLT_MAX / 440));
  EXPECT_FALSE(FindBadEntry(weights, nullptr, 0).has_value());
}

TEST(StoredValues, OfASpecification) {
  JobSpec spec;
  spec.name = "job";
  spec.mesh = *ParseMeshSpec("fsdp=1");
  spec.parameters = {{"w", {4}}, {"mask", {4}}};
  spec.parameters[1].frozen = true;
  const float wrong[] = {-1, kInf, 0, 0};
  EXPECT_EQ(FindBadEntry(RuleOf(spec, 0, 0, false), wrong, sizeof wrong)->index, 1);
  EXPECT_EQ(FindBadEntry(RuleOf(spec, 0, 1, false), wrong, sizeof wrong)->index, 1);  // exp_avg
  EXPECT_EQ(FindBadEntry(RuleOf(spec, 0, 2, false), wrong, sizeof wrong)->index, 0);  // exp_avg_sq
  EXPECT_FALSE(FindBadEntry(RuleOf(spec, 1, 0, false), wrong, sizeof wrong).has_value());
}

TEST(StoredValues, ScalesOfNf4_AreFiniteAndNotBelow0_ThoughTheWeightsAreFrozen) {
  JobSpec spec;
  spec.parameters = {{"base", {256}, WeightFormat::kNf4}};
  spec.parameters[0].frozen = true;
  for (const float bad : {kInf, kNan, -1.0f}) {
    const float scales[] = {0, FLT_MAX, bad, 1};
    const std::optional<BadEntry> found = FindBadEntry(RuleOf(spec, 0, 0, true), scales, sizeof scales);
    ASSERT_TRUE(found.has_value()) << bad;
    EXPECT_EQ(found->index, 2) << bad;
  }
  const uint8_t codes[] = {0, 0x7F, 0xFF};
  EXPECT_FALSE(FindBadEntry(RuleOf(spec, 0, 0, false), codes, sizeof codes).has_value());
}

TEST(StoredValues, TheLargestWeight_StaysFinite_TheNextDoesNot) {
  const float largest = LargestStorable(WeightFormat::kBf16);
  EXPECT_EQ(FloatToBf16Rne(largest), 0x7F7F);
  EXPECT_EQ(FloatToBf16Rne(std::nextafter(largest, kInf)), 0x7F80);
  EXPECT_EQ(LargestStorable(WeightFormat::kFp32), FLT_MAX);
}

TEST(StoredValues, TheText_HasTensorIndexAndValue) {
  const StoredRule squares = RuleOfStates(StateFormat::kFp32, false, false);
  EXPECT_EQ(BadEntryText("w.exp_avg_sq", squares, {7, -1}, 512),
            "w.exp_avg_sq: entry 519 is -1; it must be finite, not below 0");
  const StoredRule scales = RuleOfStates(StateFormat::kFp8, true, true);
  EXPECT_EQ(BadEntryText("w.exp_avg.scales", scales, {0, 1e38f}, 0),
            "w.exp_avg.scales: entry 0 is 1e+38; it must be finite, not below 0, at most 7.59559e+35");
}

}  // namespace
}  // namespace shardmesh
