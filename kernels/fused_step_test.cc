// Every implementation on this processor gives the reference's bits, wherever the streams lie and however a run is cut.
#include "kernels/fused_step.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "kernels/run_fixture.h"

namespace shardmesh {
namespace {

constexpr Format kWeightFormats[] = {Format::kFp32, Format::kBf16, Format::kBf16Sr};
constexpr Format kGradientFormats[] = {Format::kFp32, Format::kBf16};
constexpr int kSlotCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21};

uint64_t Seed() {
  static const uint64_t seed = std::random_device()();
  return seed;
}

// All formats x slots; `check` gets a case to vary further.
template <class Check>
void ForEachCase(const Check& check) {
  for (Format weights : kWeightFormats) {
    for (Format gradients : kGradientFormats) {
      for (int slots : kSlotCounts) {
        RunCase c;
        c.weights = weights;
        c.gradients = gradients;
        c.num_slots = slots;
        check(c);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// The whole arena: outputs, inputs, guards.
void ExpectSameBits(const RunCase& c, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  ASSERT_EQ(got.size(), want.size());
  if (got == want) return;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << "byte " << i << " of " << want.size() << "; " << ToString(c) << ", seed " << Seed();
  }
}

class SimdTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: the processor lacks AVX2 or FMA";
  }
};

TEST_F(SimdTest, EqualsTheReference) {
  ForEachCase([](RunCase c) {
    for (int copies : {0, 1, 2}) {
      for (int64_t elements : {0, 64, 128, 4096 + 64}) {
        if (elements > 128 && copies == 1) continue;  // time
        for (int misalign : {0, 1, 3}) {
          for (Placement placement : {Placement::kSeparate, Placement::kInPlace}) {
            c.num_copies = copies;
            c.num_elements = elements;
            c.misalign = misalign;
            c.placement = placement;
            c.first_element = 64 * 77;
            const RunFixture f(c, Seed());
            ExpectSameBits(c, f.Apply(FusedStepSimd), f.Apply(FusedStepReference));
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

TEST_F(SimdTest, EqualsTheReference_SubnormalsZerosAndHugeNumbers) {
  ForEachCase([](RunCase c) {
    c.contents = Contents::kExtreme;
    c.num_elements = 4096;
    for (int64_t step : {int64_t{1}, int64_t{1000}, int64_t{1} << 40}) {
      c.step = step;
      const RunFixture f(c, Seed());
      ExpectSameBits(c, f.Apply(FusedStepSimd), f.Apply(FusedStepReference));
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

// Counters past 32 bits: element 2^35 and beyond, and a group right before it.
TEST_F(SimdTest, EqualsTheReference_HugeTensors) {
  for (uint64_t first : {(uint64_t{1} << 35) - 64, uint64_t{1} << 35, uint64_t{3} << 50}) {
    RunCase c;
    c.first_element = first;
    const RunFixture f(c, Seed());
    ExpectSameBits(c, f.Apply(FusedStepSimd), f.Apply(FusedStepReference));
  }
}

// Every implementation: the reference always, SIMD where the processor has it.
class BackendTest : public testing::TestWithParam<FusedBackend> {
 protected:
  void SetUp() override {
    if (std::string(GetParam().name) == "simd" && !SimdSupported()) GTEST_SKIP() << "SKIPPED: no AVX2 or FMA";
  }
};

INSTANTIATE_TEST_SUITE_P(All, BackendTest,
                         testing::Values(FusedBackend{"reference", FusedStepReference, ReduceReference},
                                         FusedBackend{"simd", FusedStepSimd, ReduceSimd}),
                         [](const auto& info) { return info.param.name; });

TEST_P(BackendTest, WritesNothingButItsOutputs) {
  ForEachCase([&](RunCase c) {
    c.num_copies = 2;
    c.misalign = 1;
    const RunFixture f(c, Seed());
    const std::vector<uint8_t> before = f.image(), after = f.Apply(GetParam().step);
    std::vector<bool> output(before.size(), false);
    const auto mark = [&](const RunFixture::Stream& s) {
      std::fill_n(output.begin() + s.offset, c.num_elements * BytesPerElement(s.format), true);
    };
    for (const auto& s : {f.weights_out, f.m_out, f.v_out, f.copies[0], f.copies[1]}) mark(s);
    for (size_t i = 0; i < before.size(); ++i) {
      ASSERT_TRUE(output[i] || after[i] == before[i]) << "byte " << i << "; " << ToString(c);
    }
    const size_t bytes = c.num_elements * BytesPerElement(c.weights);
    for (const auto& copy : f.copies) {
      ASSERT_EQ(memcmp(&after[copy.offset], &after[f.weights_out.offset], bytes), 0) << ToString(c);
    }
  });
}

// `f`'s run from element `begin` on, `count` elements.
FusedRun Slice(const FusedRun& whole, const StepContext& context, int64_t begin, int64_t count,
               std::vector<const void*>* gradients) {
  const auto at = [](const void* stream, int64_t bytes) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(stream)) + bytes;
  };
  const int64_t weight_bytes = begin * BytesPerElement(context.weights);
  gradients->clear();
  for (int slot = 0; slot < whole.num_slots; ++slot) {
    gradients->push_back(at(whole.gradients[slot], begin * BytesPerElement(context.gradients)));
  }
  FusedRun run = whole;
  run.gradients = gradients->data();
  run.weights_in = at(whole.weights_in, weight_bytes);
  run.weights_out = at(whole.weights_out, weight_bytes);
  run.m_in += begin, run.v_in += begin, run.m_out += begin, run.v_out += begin;
  for (int copy = 0; copy < whole.num_copies; ++copy) run.copies[copy] = at(whole.copies[copy], weight_bytes);
  run.num_elements = count;
  run.first_element += static_cast<uint64_t>(begin);
  return run;
}

TEST_P(BackendTest, SplittingARunChangesNoBit) {
  ForEachCase([&](RunCase c) {
    c.num_elements = 1024;
    c.num_copies = 1;
    const RunFixture f(c, Seed());
    const auto want = f.Apply(GetParam().step);
    std::vector<uint8_t> memory = f.image();
    const std::vector<const void*> pointers = f.Gradients(memory.data());
    const FusedRun whole = f.Bind(memory.data(), pointers.data());
    std::vector<const void*> gradients;
    int64_t begin = 0;
    for (int64_t count : {64, 192, 64, 512, 0, 128, 64}) {
      GetParam().step(f.context(), Slice(whole, f.context(), begin, count, &gradients));
      begin += count;
    }
    ASSERT_EQ(begin, c.num_elements);
    ExpectSameBits(c, memory, want);
  });
}

// Rotating storage: odd steps walk up and write a chunk where the one before it lay, even steps walk down and write it
// where the one behind it lay. The weights, m and v are those of the same steps in place.
TEST_P(BackendTest, RotationChangesNoBit) {
  constexpr int64_t kChunk = 128, kChunks = 5, kElements = kChunk * kChunks;
  std::mt19937 random(static_cast<unsigned>(Seed()));
  std::normal_distribution<float> normal;
  std::vector<float> gradient(kElements), w(kElements), m(kElements), v(kElements);
  for (int64_t i = 0; i < kElements; ++i) {
    gradient[i] = normal(random), w[i] = normal(random), m[i] = normal(random), v[i] = std::abs(normal(random));
  }
  std::vector<float> rw(kElements + kChunk), rm(rw), rv(rw);  // the spare is in front
  std::copy(w.begin(), w.end(), rw.begin() + kChunk);
  std::copy(m.begin(), m.end(), rm.begin() + kChunk);
  std::copy(v.begin(), v.end(), rv.begin() + kChunk);
  StepContext context = RunFixture(RunCase(), 1).context();
  context.weights = context.gradients = Format::kFp32;

  const auto step = [&](int64_t i, float* win, float* min, float* vin, float* wout, float* mout, float* vout) {
    const void* gradients[] = {gradient.data() + i * kChunk};
    FusedRun run;
    run.gradients = gradients, run.num_slots = 1;
    run.weights_in = win, run.m_in = min, run.v_in = vin;
    run.weights_out = wout, run.m_out = mout, run.v_out = vout;
    run.num_elements = kChunk, run.first_element = static_cast<uint64_t>(i * kChunk);
    GetParam().step(context, run);
  };
  const auto expect_at = [&](int64_t shift) {
    EXPECT_EQ(memcmp(rw.data() + shift, w.data(), 4 * kElements), 0) << "weights, step " << context.step;
    EXPECT_EQ(memcmp(rm.data() + shift, m.data(), 4 * kElements), 0) << "m, step " << context.step;
    EXPECT_EQ(memcmp(rv.data() + shift, v.data(), 4 * kElements), 0) << "v, step " << context.step;
  };
  for (context.step = 1; context.step <= 4; ++context.step) {
    for (int64_t i = 0; i < kChunks; ++i) {
      const int64_t a = i * kChunk;
      step(i, &w[a], &m[a], &v[a], &w[a], &m[a], &v[a]);
    }
    const bool up = context.step % 2 == 1;
    for (int64_t n = 0; n < kChunks; ++n) {
      const int64_t i = up ? n : kChunks - 1 - n;
      const int64_t from = (i + (up ? 1 : 0)) * kChunk, to = (i + (up ? 0 : 1)) * kChunk;
      step(i, &rw[from], &rm[from], &rv[from], &rw[to], &rm[to], &rv[to]);
    }
    expect_at(up ? 0 : kChunk);
  }
}

// The unfused way, a reduction and then a step of its fp32 result, gives the fused bits.
TEST_P(BackendTest, ReduceThenStepEqualsTheFusedPass) {
  ForEachCase([&](RunCase c) {
    c.num_elements = 640;
    c.misalign = 3;
    const RunFixture f(c, Seed());
    const auto want = f.Apply(GetParam().step);
    std::vector<uint8_t> memory = f.image();
    const std::vector<const void*> pointers = f.Gradients(memory.data());
    FusedRun run = f.Bind(memory.data(), pointers.data());
    std::vector<float> sum(c.num_elements + 64, 42.0f);
    GetParam().reduce(c.gradients, {run.gradients, run.num_slots, run.divide_scale, sum.data(), run.num_elements});
    EXPECT_EQ(sum[c.num_elements], 42.0f);
    for (const int64_t offset : {0, 1}) {  // past the caches, where that is possible, the same
      alignas(32) float streamed[640 + 8];
      streamed[offset + c.num_elements] = 42.0f;
      GetParam().reduce(c.gradients,
                        {run.gradients, run.num_slots, run.divide_scale, streamed + offset, run.num_elements, true});
      EXPECT_EQ(std::memcmp(streamed + offset, sum.data(), c.num_elements * sizeof(float)), 0);
      EXPECT_EQ(streamed[offset + c.num_elements], 42.0f);
    }
    const void* one[] = {sum.data()};
    run.gradients = one;
    run.num_slots = 1;
    run.divide_scale = 1;
    StepContext context = f.context();
    context.gradients = Format::kFp32;
    GetParam().step(context, run);
    ExpectSameBits(c, memory, want);
  });
}

#if defined(__x86_64__)
// A caller that flushes subnormals and rounds towards zero gets the same bits, and its settings back.
TEST_P(BackendTest, CallersFloatingPointEnvironmentDoesNotMatter) {
  RunCase c;
  c.weights = Format::kFp32;
  c.contents = Contents::kExtreme;
  c.num_elements = 4096;
  c.num_slots = 4;
  const RunFixture f(c, Seed());
  const auto want = f.Apply(GetParam().step);
  const unsigned before = _mm_getcsr();
  const unsigned odd = before | 0x8040 /* flush to zero, subnormals are zero */ | 0x6000 /* towards zero */;
  _mm_setcsr(odd);
  const auto got = f.Apply(GetParam().step);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & ~0x3Fu, odd & ~0x3Fu);
  ExpectSameBits(c, got, want);
}
#endif

TEST(BestFusedBackendTest, IsSimdWhereSupported) {
  EXPECT_STREQ(BestFusedBackend().name, SimdSupported() ? "simd" : "reference");
  EXPECT_EQ(BestFusedStep(), SimdSupported() ? FusedStepSimd : FusedStepReference);
}

}  // namespace
}  // namespace shardmesh
