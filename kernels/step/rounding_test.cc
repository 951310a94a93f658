// Stochastic rounding: what is rounded up, how often, and that it belongs to an element and not to who computes it.
#include <cmath>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/base/philox.h"
#include "kernels/optimizer_step.h"
#include "kernels/rules/split_weight.h"
#include "kernels/step/step_fixture.h"

namespace shardmesh {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000u;

// Every bf16, what is cut off behind it, and draws around those that decide: up when both reach 2^16 together.
TEST(Bf16Sr, BetweenAllNeighbours_GoesUpWhenTheDrawReachesIt) {
  for (uint32_t upper = 0; upper < 0x10000u; ++upper) {
    if ((upper & 0x7F80u) == 0x7F80u) continue;  // infinities and NaN
    for (const uint32_t cut : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const float x = FloatOfBits(upper << 16 | cut);
      for (const uint32_t draw : {0u, 0xFFFFu - cut, (0x10000u - cut) & 0xFFFFu, 0xFFFFu}) {
        ASSERT_EQ(FloatToBf16Sr(x, draw), (upper + (cut + draw >= 0x10000u ? 1 : 0)) & 0xFFFFu)
            << upper << " " << cut << " " << draw;
      }
    }
  }
}

// Chi-squared over all 255 exponents of the number of roundings up among 4,096 draws; expected is the part that is cut
// off. The draws are fixed, so is the outcome: a generator without bias passes with probability 1 - 1e-6, the quantile
// of chi-squared with 255 degrees of freedom being 380 there (Wilson and Hilferty, 1931).
TEST(Bf16Sr, IsUnbiasedAtEveryExponent) {
  constexpr int kDraws = 4096;
  constexpr double kQuantile = 380;
  const PhiloxKey key = MakePhiloxKey(12345, DrawPurpose::kWeightRounding);
  double chi_squared = 0;
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    const uint32_t cut = 0x2000u + 173u * exponent;
    const float x = FloatOfBits(exponent << 23 | 0x150000u | cut);
    int up = 0;
    for (uint64_t i = 0; i < kDraws; ++i) {
      up += FloatToBf16Sr(x, Draw16(key, 7, exponent, i)) != FloatBits(x) >> 16;
    }
    const double p = cut / 65536.0, difference = up - kDraws * p;
    chi_squared += difference * difference / (kDraws * p * (1 - p));
  }
  EXPECT_LT(chi_squared, kQuantile);
  EXPECT_GT(chi_squared, 155) << "as improbable: more even than chance";
}

// Over all 256 draws the 24 bits that stay are right on average, exactly; and the bf16 is the nearest one.
TEST(SplitWeight, Stochastic_IsUnbiased_AndItsBf16IsTheNearest) {
  for (uint32_t i = 0; i < 1u << 16; ++i) {
    const uint32_t bits = (i * 2654435761u) & 0x7FFFFFFFu;
    if (bits >= 0x7F7F0000u) continue;  // finite, and not about to round to infinity
    const float x = FloatOfBits(bits);
    int64_t sum = 0;
    for (uint32_t draw = 0; draw < 256; ++draw) {
      const SplitWeight<uint32_t> split = SplitStochastic(x, draw);
      const float kept = JoinStochastic<float>(split.upper, split.remainder);
      sum += static_cast<int64_t>(FloatBits(kept));
      const auto distance = static_cast<int32_t>((split.upper << 16) - FloatBits(kept));
      ASSERT_TRUE(-0x8000 < distance && distance <= 0x8000) << bits << " " << draw;
    }
    ASSERT_EQ(sum, int64_t{256} * bits) << bits;
  }
}

TEST(SplitWeight, Exact_IsExact) {
  for (uint64_t i = 0; i < 1u << 22; ++i) {
    const auto bits = static_cast<uint32_t>(i * 2654435761u);
    const float x = FloatOfBits(bits);
    if (!std::isfinite(x)) continue;
    const SplitWeight<uint32_t> split = SplitExact(x);
    ASSERT_EQ(FloatBits(JoinExact<float>(split.upper, split.remainder)), bits);
    ASSERT_EQ(static_cast<int32_t>(split.remainder), static_cast<int16_t>(split.remainder)) << bits;
  }
  for (const uint32_t bits : {kInfinityBits, kInfinityBits | 0x80000000u}) {
    const SplitWeight<uint32_t> split = SplitExact(FloatOfBits(bits));
    EXPECT_EQ(split.upper << 16, bits);
    EXPECT_EQ(split.remainder, 0u);
  }
  EXPECT_EQ(SplitExact(FloatOfBits(0xFFFFFFFFu)).upper, uint32_t{kBf16Nan});
}

std::vector<uint32_t> WordsOf(Guarded& part) {
  std::vector<uint32_t> words(part.size() / 4);
  std::memcpy(words.data(), part.data(), part.size());
  return words;
}

// bf16+16 is fp32 in two places: the same steps have the same bits.
TEST(OptimizerStep, Bf16Plus16_ReproducesFp32_BitForBit) {
  for (const StepCase& each : AllStepCases()) {
    if (each.weights != WeightFormat::kBf16Plus16) continue;
    SCOPED_TRACE(each.ToString());
    StepCase whole = each;
    whole.weights = WeightFormat::kFp32;
    StepTensor split(each, 700), fp32(whole, 700);
    for (int64_t i = 0; i < 700; ++i) {  // from the same weights
      std::memset(fp32.parts()[0].data() + 4 * i, 0, 2);
      std::memcpy(fp32.parts()[0].data() + 4 * i + 2, split.parts()[0].data() + 2 * i, 2);
    }
    split.Step(BestOptimizerStep(), 5);
    fp32.Step(BestOptimizerStep(), 5);
    const std::vector<uint32_t> expected = WordsOf(fp32.parts()[0]);
    for (size_t i = 0; i < expected.size(); ++i) {
      uint16_t upper = 0, remainder = 0;
      std::memcpy(&upper, split.parts()[0].data() + 2 * i, 2);
      std::memcpy(&remainder, split.parts()[1].data() + 2 * i, 2);
      const auto joined = (uint32_t{upper} << 16) + static_cast<uint32_t>(static_cast<int16_t>(remainder));
      ASSERT_EQ(joined, expected[i]) << i;
    }
  }
}

// A run with its slots' addresses in a copy of its own.
class SharedRun {
 public:
  SharedRun(StepTensor& tensor, int64_t begin, int64_t end) : run_(tensor.RunOf(/*step=*/1, begin, end)) {
    slots_.assign(run_.gradients, run_.gradients + run_.num_slots);
  }
  OptimizerRun run() const {
    OptimizerRun run = run_;
    run.gradients = slots_.data();
    return run;
  }

 private:
  OptimizerRun run_;
  std::vector<const void*> slots_;
};

// 1 to 64 shards, every second one on a thread of its own, the last one first.
TEST(OptimizerStep, OnAnyNumberOfShardsAndThreads_TheBitsAreTheSame) {
  constexpr int64_t kElements = 64 * kStepAlignment - 96;
  for (const StateFormat states :
       {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kFp8x32}) {
    StepCase each = AllStepCases().back();
    each.states = states;
    each.num_slots = 2;
    StepTensor whole(each, kElements);
    whole.Step(BestOptimizerStep(), 1);
    for (int64_t shards = 1; shards <= 64; ++shards) {
      StepTensor cut(each, kElements);
      const SharedRun filled(cut, 0, kElements);  // its gradients
      const auto begin_of = [&](int64_t shard) { return std::min(kElements, 64 * shard / shards * kStepAlignment); };
      std::vector<std::thread> threads;
      for (int64_t shard = shards; shard-- > 0;) {
        const int64_t begin = begin_of(shard), end = shard + 1 == shards ? kElements : begin_of(shard + 1);
        const OptimizerContext context = each.Context(1);
        const SharedRun run(cut, begin, end);
        if (shard % 2 == 0) BestOptimizerStep()(context, run.run());
        if (shard % 2 == 1) threads.emplace_back([context, run] { BestOptimizerStep()(context, run.run()); });
      }
      for (std::thread& thread : threads) thread.join();
      ASSERT_TRUE(whole == cut) << shards << " shards, states " << StateFormatName(states);
    }
  }
}

}  // namespace
}  // namespace shardmesh
