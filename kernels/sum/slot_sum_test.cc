// The reference is the tree sum, and SIMD the reference, wherever slots and sum lie.
#include "kernels/sum/slot_sum.h"

#include <gtest/gtest.h>

#include "core/base/reduction.h"
#include "kernels/cpu/processor.h"
#include "kernels/sum/slot_sum_fixture.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardmesh {
namespace {

uint64_t Seed() {
  static const uint64_t seed = std::random_device()();
  return seed;
}

// The tree as core/base/reduction.h defines it, of slots [first, first + slots).
float Tree(const SlotSumFixture& fixture, int first, int slots, int64_t i) {
  if (slots == 1) return fixture.At(first, i);
  const int left = LeftLeaves(slots);
  return Tree(fixture, first, left, i) + Tree(fixture, first + left, slots - left, i);
}

TEST(SlotSum, Reference_IsTheTreeTimesTheFactor_AndNothingElseIsWritten) {
  ForEachSlotSum({1, 67}, [](const SlotSumCase& c) {
    const SlotSumFixture fixture(c, Seed());
    for (const float scale : {1.0f, 1.0f / 3}) {
      std::vector<uint32_t> expected(c.elements + 2 * SlotSumFixture::kGuard, SlotSumFixture::kGuardBits);
      for (int64_t i = 0; i < c.elements; ++i) {
        expected[SlotSumFixture::kGuard + i] = FloatBits(Tree(fixture, 0, c.num_slots, i) * scale);
      }
      ASSERT_EQ(fixture.Sum(SlotSumReference, scale), expected) << c.ToString() << ", seed " << Seed();
    }
  });
}

TEST(SlotSum, Simd_IsTheReference_BitForBit) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  ForEachSlotSum({0, 1, 63, 64, 65, 640, 1024 + 17}, [](const SlotSumCase& c) {
    const SlotSumFixture fixture(c, Seed());
    const std::vector<uint32_t> expected = fixture.Sum(SlotSumReference, 0.2f);
    for (const int64_t offset : {0, 1, 8}) {
      for (const bool streamed : {false, true}) {
        ASSERT_EQ(fixture.Sum(SlotSumSimd, 0.2f, offset, streamed), expected)
            << c.ToString() << ", offset " << offset << ", streamed " << streamed << ", seed " << Seed();
      }
    }
  });
}

#if defined(__x86_64__)
// A caller that flushes subnormals and rounds towards zero gets the same bits, and its settings back.
TEST(SlotSum, CallersFloatingPointEnvironment_DoesNotMatter) {
  for (const SlotSumFn sum : {SlotSumReference, BestSlotSum()}) {
    const SlotSumFixture fixture({Format::kFp32, 4, 4096 + 3, true}, Seed());
    const std::vector<uint32_t> expected = fixture.Sum(sum, 0.25f);
    const unsigned before = _mm_getcsr();
    const unsigned odd = before | 0x8040 /* flush to zero, subnormals are zero */ | 0x6000 /* towards zero */;
    _mm_setcsr(odd);
    const std::vector<uint32_t> got = fixture.Sum(sum, 0.25f);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & ~0x3Fu, odd & ~0x3Fu);
    EXPECT_EQ(got, expected) << "seed " << Seed();
  }
}
#endif

TEST(SlotSum, Best_IsSimdWhereSupported) {
  EXPECT_EQ(BestSlotSum(), SimdSupported() ? SlotSumSimd : SlotSumReference);
  EXPECT_STREQ(BestImplementation(), SimdSupported() ? "simd" : "reference");
}

}  // namespace
}  // namespace shardmesh
