// Gathered weights, whatever the runs, are what kernels/encode/encode.h gives for the whole tensor.
#include "kernels/encode/gathered.h"

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/encode/quantized_fixture.h"

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
      : Gathered(shape, Whole(gather, format, values, Halves(values)), length, reference) {}

  // `whole`: the values of a tensor of that shape.
  Gathered(const std::vector<int64_t>& shape, const GatheredRun& whole, int64_t length, bool reference)
      : quantized(SpecOf(whole.gather), shape), copy(SpecOf(whole.gather), shape) {
    const GatherFormat gather = whole.gather;
    const ScaleBlocks blocks = ScaleBlocksOf(gather, shape).value();
    EXPECT_EQ(PartsOf(SpecOf(gather), shape).value()[1].dims, ScaleShape(gather, shape));
    std::vector<std::atomic<uint32_t>> maxima(blocks.num_blocks);
    const int64_t n = whole.num_elements, bytes = whole.row_scales != nullptr ? 1 : BytesPerElement(whole.format);
    const bool stored = whole.nf4_scales != nullptr;
    const auto visit = [&](const auto& each) {
      for (int64_t first = (n - 1) / length * length; first >= 0; first -= length) {
        GatheredRun run = whole;
        run.blocks = &blocks;
        run.values = static_cast<const char*>(whole.values) + (stored ? first / 2 : first * bytes);
        if (stored) run.nf4_scales += first / kNf4BlockElements;
        if (whole.row_scales != nullptr) run.row_scales += first / whole.row_elements;
        run.first_element = first;
        run.num_elements = std::min(length, n - first);
        each(run);
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
      const GatheredPlace places[] = {{quantized.codes() + at, scales[0].data()},
                                      {copy.codes() + at, scales[1].data()}};
      (reference ? EncodeGatheredReference : EncodeGathered)(run, maxima.data(), places, 2);
    });
    Split(gather, blocks.num_blocks, scales[0].data(), quantized);
    Split(gather, blocks.num_blocks, scales[1].data(), copy);
  }

  static std::vector<uint16_t> Halves(const std::vector<float>& values) {
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(static_cast<uint16_t>(FloatBits(value) >> 16));
    return halves;
  }
  static GatheredRun Whole(GatherFormat gather, Format format, const std::vector<float>& values,
                           const std::vector<uint16_t>& halves) {
    const void* const begin = format == Format::kFp32 ? static_cast<const void*>(values.data()) : halves.data();
    return {gather, nullptr, format, begin, 0, static_cast<int64_t>(values.size())};
  }

  // The scales of a place, and what lies behind them, as the parts that Encode has.
  static void Split(GatherFormat gather, int64_t num_scales, const void* place, Quantized& to) {
    const auto* const from = static_cast<const char*>(place);
    std::memcpy(to.pointers[1], from, num_scales * GatheredScaleBytes(gather));
    if (gather != GatherFormat::kNf4) return;
    const int64_t factors = Nf4FactorsOffset(num_scales), mean = Nf4MeanOffset(num_scales);
    std::memcpy(to.pointers[2], from + factors, mean - factors);
    std::memcpy(to.pointers[3], from + mean, 4);
  }

  Quantized quantized, copy;
};

void ExpectEncoded(GatherFormat gather, const std::vector<int64_t>& shape, std::vector<float> values) {
  for (const Format format : {Format::kFp32, Format::kBf16}) {
    for (float& x : values) x = format == Format::kFp32 ? x : Bf16ToFloat(FloatToBf16Rne(x));
    Quantized expected = Encoded(SpecOf(gather), shape, values);
    for (const int64_t length : {int64_t{32}, int64_t{256}, int64_t{4096}, int64_t{1} << 30}) {
      if (gather == GatherFormat::kNf4 && length % kNf4BlockElements != 0) continue;
      SCOPED_TRACE(std::string(GatherFormatName(gather)) + " in runs of " + std::to_string(length));
      for (const bool reference : {false, true}) {
        Gathered gathered(gather, shape, format, values, length, reference);
        ASSERT_EQ(gathered.quantized.parts, expected.parts) << reference;
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

// Of weights that are stored in int8_row: what Encode gives for the decoded whole, in runs of whole rows and whole
// blocks, whatever the caller's rounding.
void ExpectRowsEncoded(const std::vector<int64_t>& shape, Quantized& rows) {
  const std::vector<float> values = Decoded(Spec(CodeFormat::kInt8Row), rows);
  const int64_t columns = shape.empty() ? 1 : shape.back();
  for (const GatherFormat gather : kGathers) {
    if (!ScaleBlocksOf(gather, shape).ok()) continue;
    GatheredRun whole{gather, nullptr, Format::kFp32, rows.codes(), 0, Product(shape)};
    whole.row_scales = rows.scales();
    whole.row_elements = columns;
    const Quantized expected = Encoded(SpecOf(gather), shape, values);
    const int64_t shortest = std::lcm(columns, int64_t{256});
    for (const int64_t length : {shortest, 3 * shortest, 17 * shortest, int64_t{1} << 40}) {
      SCOPED_TRACE(std::string(GatherFormatName(gather)) + " in runs of " + std::to_string(length));
      for (const bool reference : {false, true}) {
        for (const int rounding : {FE_TONEAREST, FE_UPWARD}) {
          std::fesetround(rounding);
          Gathered gathered(shape, whole, length, reference);
          std::fesetround(FE_TONEAREST);
          ASSERT_EQ(gathered.quantized.parts, expected.parts) << reference << " rounding " << rounding;
          ASSERT_EQ(gathered.copy.parts, expected.parts) << reference << " rounding " << rounding;
        }
      }
    }
  }
}

TEST(GatheredTest, WeightsStoredInRows_AreWhatEncodeGivesOfTheDecodedWhole) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::vector<std::vector<int64_t>> shapes = kShapes;
  std::mt19937 random(seed);
  for (int i = 0; i < 6; ++i) {
    shapes.push_back({1 + static_cast<int64_t>(random() % 300), 1 + static_cast<int64_t>(random() % 600)});
  }
  for (const std::vector<int64_t>& shape : shapes) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    std::vector<float> values = Numbers(Product(shape), static_cast<int>(random() >> 1));
    Quantized rows = Encoded(Spec(CodeFormat::kInt8Row), shape, values);
    ASSERT_NO_FATAL_FAILURE(ExpectRowsEncoded(shape, rows));
    values.assign(values.size(), 0);
    values.front() = 3e38f;
    Quantized large = Encoded(Spec(CodeFormat::kInt8Row), shape, values);
    ASSERT_NO_FATAL_FAILURE(ExpectRowsEncoded(shape, large));
  }
}

// Nf4 as it is stored, in both implementations: the codes of Encode, the largest magnitudes, and, gathered from there
// in runs of any length, all that Encode gives for the whole.
TEST(GatheredTest, WeightsStoredInNf4_AreGatheredAsEncodeGivesThem) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<std::vector<int64_t>> shapes = kShapes;
  shapes.push_back({130, 512});
  for (int i = 0; i < 6; ++i) shapes.push_back({1 + static_cast<int64_t>(random() % 70'000)});
  for (const std::vector<int64_t>& shape : shapes) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    const int64_t n = Product(shape);
    std::vector<float> values = Numbers(n, static_cast<int>(random() >> 1));
    if (n > 200) std::fill(values.begin() + 64, values.begin() + 192, 0.0f);
    const Quantized expected = Encoded(Spec(CodeFormat::kNf4), shape, values);
    std::vector<uint8_t> codes((n + 1) / 2 + 1, 0xCD), others = codes;
    std::vector<float> scales((n + 63) / 64 + 1, -7), other_scales = scales;
    std::fesetround(FE_UPWARD);
    StoreNf4(values.data(), n, codes.data(), scales.data());
    std::fesetround(FE_TONEAREST);
    StoreNf4Reference(values.data(), n, others.data(), other_scales.data());
    ASSERT_EQ(codes, others);
    ASSERT_EQ(scales, other_scales);
    ASSERT_EQ(codes.back(), 0xCD) << "behind the last one";
    ASSERT_EQ(scales.back(), -7) << "behind the last one";
    ASSERT_EQ(std::memcmp(codes.data(), expected.parts[0].data(), (n + 1) / 2), 0);
    for (int64_t i = 0; i < n; i += 64) {
      float largest = 0;
      for (int64_t e = i; e < std::min(n, i + 64); ++e) largest = std::max(largest, std::fabs(values[e]));
      ASSERT_EQ(scales[i / 64], largest);
    }
    GatheredRun whole{GatherFormat::kNf4, nullptr, Format::kFp32, codes.data(), 0, n};
    whole.nf4_scales = scales.data();
    for (const int64_t length : {int64_t{256}, int64_t{4096}, int64_t{1} << 40}) {
      for (const bool reference : {false, true}) {
        Gathered gathered(shape, whole, length, reference);
        ASSERT_EQ(gathered.quantized.parts, expected.parts) << reference << " runs of " << length;
        ASSERT_EQ(gathered.copy.parts, expected.parts) << reference << " runs of " << length;
      }
    }
  }
}

// A row whose scale is no number makes everything under the scales of its elements NaN.
TEST(GatheredTest, RowsThatAreNotFinite_AreNanUnderTheirScale) {
  const std::vector<int64_t> shape = {130, 256};
  constexpr int64_t kBadRow = 5;
  for (const GatherFormat gather : kGathers) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      Quantized rows = Encoded(Spec(CodeFormat::kInt8Row), shape, Numbers(Product(shape), 5));
      rows.scales()[kBadRow] = bad;
      GatheredRun whole{gather, nullptr, Format::kFp32, rows.codes(), 0, Product(shape)};
      whole.row_scales = rows.scales();
      whole.row_elements = shape[1];
      Gathered gathered(shape, whole, 512, /*reference=*/false);
      EXPECT_EQ(gathered.quantized.parts, Gathered(shape, whole, 512, /*reference=*/true).quantized.parts);
      const std::vector<float> decoded = Decoded(SpecOf(gather), gathered.quantized);
      const ScaleBlocks blocks = ScaleBlocksOf(gather, shape).value();
      std::vector<bool> is_bad(blocks.num_blocks);
      ForEachPiece(blocks, kBadRow * shape[1], shape[1],
                   [&](int64_t, int64_t, int64_t block, bool) { is_bad[block] = true; });
      ForEachPiece(blocks, 0, Product(shape), [&](int64_t at, int64_t num, int64_t block, bool) {
        for (int64_t i = at; i < at + num; ++i) {
          ASSERT_EQ(std::isnan(decoded[i]), is_bad[block] || gather == GatherFormat::kNf4)
              << GatherFormatName(gather) << " " << i;
        }
      });
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
        EXPECT_EQ(gathered.quantized.parts,
                  Gathered(gather, shape, format, values, 256, /*reference=*/true).quantized.parts);
        const std::vector<float> decoded = Decoded(SpecOf(gather), gathered.quantized);
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
