// Gathered weights, whatever the runs, are what kernels/encode.h gives for the whole tensor.
#include "kernels/gathered.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/coded_fixture.h"

namespace shardmesh {
namespace {

constexpr GatherFormat kGathers[] = {GatherFormat::kFp8Tensor, GatherFormat::kFp8Row,  GatherFormat::kFp8Block,
                                     GatherFormat::kMx8,       GatherFormat::kInt8Row, GatherFormat::kNf4};
const std::vector<std::vector<int64_t>> kShapes = {{},        {1},        {7},         {320},       {300, 1},
                                                   {3, 96},   {130, 257}, {4, 3, 160}, {5, 1000},   {257, 128},
                                                   {2, 4097}, {64, 64},   {1, 32},     {1000, 1, 3}};

int64_t Product(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

CodeSpec SpecOf(GatherFormat gather) { return Spec(ParseCodeFormat(GatherFormatName(gather)).value()); }

// Codes and scales after both passes over runs of `length` elements, the last ones first.
struct Gathered {
  Gathered(GatherFormat gather, const std::vector<int64_t>& shape, Format format, const std::vector<float>& values,
           int64_t length, bool reference = false)
      : coded(SpecOf(gather), shape), copy(SpecOf(gather), shape) {
    const ScaleBlocks blocks = ScaleBlocksOf(gather, shape).value();
    EXPECT_EQ(PartsOf(SpecOf(gather), shape).value()[1].dims, ScaleShape(gather, shape));
    std::vector<std::atomic<uint32_t>> maxima(blocks.num_blocks);
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(static_cast<uint16_t>(FloatBits(value) >> 16));
    const auto n = static_cast<int64_t>(values.size());
    const auto visit = [&](const auto& each) {
      for (int64_t first = (n - 1) / length * length; first >= 0; first -= length) {
        each(GatheredRun{gather, &blocks, format,
                         format == Format::kFp32 ? static_cast<const void*>(&values[first]) : &halves[first], first,
                         std::min(length, n - first)});
      }
    };
    const auto raise = reference ? RaiseMaximaReference : RaiseMaxima;
    visit([&](const GatheredRun& run) { raise(run, maxima.data()); });
    visit([&](const GatheredRun& run) { raise(run, maxima.data()); });  // again: nothing changes
    const bool nf4 = gather == GatherFormat::kNf4;
    const float mean = nf4 ? Nf4Mean(maxima.data(), blocks.num_blocks) : 0;
    std::vector<uint32_t> scales[2];
    for (auto& each : scales) each.resize(GatheredScalesBytes(gather, blocks.num_blocks) / 4 + 1);
    visit([&](GatheredRun run) {
      run.mean = mean;
      const int64_t at = nf4 ? run.first_element / 2 : run.first_element;
      const GatheredPlace places[] = {{coded.codes() + at, scales[0].data()}, {copy.codes() + at, scales[1].data()}};
      (reference ? EncodeGatheredReference : EncodeGathered)(run, maxima.data(), places, 2);
    });
    Split(gather, blocks.num_blocks, scales[0].data(), coded);
    Split(gather, blocks.num_blocks, scales[1].data(), copy);
  }

  // The scales of a place, and what lies behind them, as the parts that Encode has.
  static void Split(GatherFormat gather, int64_t num_scales, const void* place, Coded& to) {
    const auto* const from = static_cast<const char*>(place);
    std::memcpy(to.pointers[1], from, num_scales * GatheredScaleBytes(gather));
    if (gather != GatherFormat::kNf4) return;
    const int64_t factors = Nf4FactorsOffset(num_scales), mean = Nf4MeanOffset(num_scales);
    std::memcpy(to.pointers[2], from + factors, mean - factors);
    std::memcpy(to.pointers[3], from + mean, 4);
  }

  Coded coded, copy;
};

void ExpectEncoded(GatherFormat gather, const std::vector<int64_t>& shape, std::vector<float> values) {
  for (const Format format : {Format::kFp32, Format::kBf16}) {
    for (float& x : values) x = format == Format::kFp32 ? x : Bf16ToFloat(FloatToBf16Rne(x));
    Coded expected = Encoded(SpecOf(gather), shape, values);
    for (const int64_t length : {int64_t{32}, int64_t{256}, int64_t{4096}, int64_t{1} << 30}) {
      if (gather == GatherFormat::kNf4 && length % kNf4BlockElements != 0) continue;
      SCOPED_TRACE(std::string(GatherFormatName(gather)) + " in runs of " + std::to_string(length));
      for (const bool reference : {false, true}) {
        Gathered gathered(gather, shape, format, values, length, reference);
        ASSERT_EQ(gathered.coded.parts, expected.parts) << reference;
        ASSERT_EQ(gathered.copy.parts, expected.parts) << reference;
      }
    }
  }
}

TEST(GatheredTest, EveryFormatAndShape_IsWhatEncodeGives) {
  int seed = 1;
  for (const GatherFormat gather : kGathers) {
    for (const std::vector<int64_t>& shape : kShapes) {
      if (!ScaleBlocksOf(gather, shape).ok()) continue;
      std::vector<float> values = Numbers(Product(shape), ++seed);
      ASSERT_NO_FATAL_FAILURE(ExpectEncoded(gather, shape, values));
      for (float& x : values) x *= 0x1p-30f;
      ASSERT_NO_FATAL_FAILURE(ExpectEncoded(gather, shape, values));
      values.assign(values.size(), 0);
      ASSERT_NO_FATAL_FAILURE(ExpectEncoded(gather, shape, values));
      values.back() = 0x1.FEp127f;
      values.front() = -1e-45f;
      ASSERT_NO_FATAL_FAILURE(ExpectEncoded(gather, shape, values));
    }
  }
}

// One value that is not finite makes everything under its scale NaN, and nothing else. Tensors of nf4 share a mean.
TEST(GatheredTest, ValuesThatAreNotFinite_AreNanUnderTheirScale) {
  const std::vector<int64_t> shape = {130, 160};
  for (const GatherFormat gather : kGathers) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      for (const Format format : {Format::kFp32, Format::kBf16}) {
        std::vector<float> values = Numbers(Product(shape), 5);
        for (float& x : values) x = Bf16ToFloat(FloatToBf16Rne(x));
        values[3 * 160 + 130] = -bad;
        Gathered gathered(gather, shape, format, values, 256);
        EXPECT_EQ(gathered.coded.parts, Gathered(gather, shape, format, values, 256, /*reference=*/true).coded.parts);
        const std::vector<float> decoded = Decoded(SpecOf(gather), gathered.coded);
        const ScaleBlocks blocks = ScaleBlocksOf(gather, shape).value();
        int64_t bad_block = -1;
        ForEachPiece(blocks, 3 * 160 + 130, 1, [&](int64_t, int64_t, int64_t block, bool) { bad_block = block; });
        ForEachPiece(blocks, 0, Product(shape), [&](int64_t at, int64_t num, int64_t block, bool) {
          for (int64_t i = at; i < at + num; ++i) {
            ASSERT_EQ(std::isnan(decoded[i]), block == bad_block || gather == GatherFormat::kNf4) << i;
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
