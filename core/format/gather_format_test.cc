#include "core/format/gather_format.h"

#include <map>
#include <tuple>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr GatherFormat kAll[] = {GatherFormat::kStored,   GatherFormat::kFp8Tensor, GatherFormat::kFp8Row,
                                 GatherFormat::kFp8Block, GatherFormat::kMx8,       GatherFormat::kInt8Row,
                                 GatherFormat::kNf4};

TEST(GatherFormatTest, Names_AreParsed) {
  for (const GatherFormat format : kAll) {
    ASSERT_OK_AND_ASSIGN(const GatherFormat parsed, ParseGatherFormat(GatherFormatName(format)));
    EXPECT_EQ(parsed, format);
  }
  EXPECT_THAT(ParseGatherFormat("fp8"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"fp8\" is no gather format; there are stored, fp8_tensor")));
}

TEST(GatherFormatTest, Bytes) {
  EXPECT_EQ(GatheredCodeBytes(Format::kFp32, GatherFormat::kStored, 10), 40);
  EXPECT_EQ(GatheredCodeBytes(Format::kBf16, GatherFormat::kStored, 10), 20);
  EXPECT_EQ(GatheredCodeBytes(Format::kFp32, GatherFormat::kFp8Row, 10), 10);
  EXPECT_EQ(GatheredCodeBytes(Format::kFp32, GatherFormat::kNf4, 9), 5);
  EXPECT_EQ(GatheredScaleBytes(GatherFormat::kStored), 0);
  EXPECT_EQ(GatheredScaleBytes(GatherFormat::kInt8Row), 4);
  EXPECT_EQ(GatheredScaleBytes(GatherFormat::kMx8), 1);
  EXPECT_EQ(GatheredScalesBytes(GatherFormat::kStored, 0), 0);
  EXPECT_EQ(GatheredScalesBytes(GatherFormat::kInt8Row, 7), 28);
  EXPECT_EQ(GatheredScalesBytes(GatherFormat::kNf4, 1), 4 + 4 + 4);
  EXPECT_EQ(GatheredScalesBytes(GatherFormat::kNf4, 257), 260 + 2 * 4 + 4);
}

TEST(GatherFormatTest, WeightsStoredInCodes_AreGatheredInTheirsUnlessAskedOtherwise) {
  EXPECT_EQ(GatherOf(WeightFormat::kFp32, GatherFormat::kStored), GatherFormat::kStored);
  EXPECT_EQ(GatherOf(WeightFormat::kInt8Row, GatherFormat::kStored), GatherFormat::kInt8Row);
  EXPECT_EQ(GatherOf(WeightFormat::kInt8Row, GatherFormat::kMx8), GatherFormat::kMx8);
  EXPECT_EQ(GatherOf(WeightFormat::kNf4, GatherFormat::kStored), GatherFormat::kNf4);
  EXPECT_EQ(GatheredFormat(WeightFormat::kNf4), Format::kFp32);
  for (const GatherFormat gather : {GatherFormat::kStored, GatherFormat::kInt8Row}) {
    EXPECT_FALSE(IsQuantized(WeightFormat::kInt8Row, gather)) << "copied";
  }
  EXPECT_FALSE(IsQuantized(WeightFormat::kBf16, GatherFormat::kStored));
  EXPECT_TRUE(IsQuantized(WeightFormat::kBf16, GatherFormat::kInt8Row));
  EXPECT_TRUE(IsQuantized(WeightFormat::kInt8Row, GatherFormat::kFp8Row));
  EXPECT_TRUE(IsQuantized(WeightFormat::kNf4, GatherFormat::kStored)) << "its scales are of the whole tensor";
  EXPECT_EQ(LayoutOf(WeightFormat::kNf4).codes.BytesOf(1001), 501);
  EXPECT_EQ(LayoutOf(WeightFormat::kNf4).extra.BytesOf(1001), 16 * 4);
}

TEST(GatherFormatTest, ShapesThatDoNotFit_AreRefused) {
  using Code = absl::StatusCode;
  const std::vector<std::tuple<GatherFormat, std::vector<int64_t>, Code, const char*>> cases = {
      {GatherFormat::kFp8Tensor,
       {3, 0},
       Code::kInvalidArgument,
       "shape [3,0] cannot be gathered as fp8_tensor, which codes tensors with elements"},
      {GatherFormat::kFp8Block, {128}, Code::kInvalidArgument, "fp8_block, which codes matrices; take another format"},
      {GatherFormat::kFp8Block, {2, 128, 128}, Code::kInvalidArgument, "matrices"},
      {GatherFormat::kMx8, {32, 33}, Code::kInvalidArgument, "rows of multiples of 32"},
      {GatherFormat::kMx8, {}, Code::kInvalidArgument, "shape [] cannot be gathered as mx8"},
      {GatherFormat::kNf4, {0}, Code::kInvalidArgument, "nf4, which codes tensors with elements"},
  };
  for (const auto& [gather, shape, code, message] : cases) {
    EXPECT_THAT(ScaleBlocksOf(gather, shape).status(), StatusIs(code, HasSubstr(message)));
  }
  EXPECT_OK(ScaleBlocksOf(GatherFormat::kStored, {0, 5}));
}

// Element by element: which block has it, from the definition of the format.
int64_t BlockOf(GatherFormat gather, int64_t columns, int64_t e) {
  switch (gather) {
    case GatherFormat::kFp8Row:
    case GatherFormat::kInt8Row:
      return e / columns;
    case GatherFormat::kFp8Block:
      return e / columns / 128 * ((columns + 127) / 128) + e % columns / 128;
    case GatherFormat::kMx8:
      return e / 32;
    case GatherFormat::kNf4:
      return e / 64;
    default:
      return 0;
  }
}

TEST(GatherFormatTest, Pieces_CoverEveryStretch_AndBlocksBeginOnce) {
  const std::vector<std::vector<int64_t>> shapes = {{}, {1}, {7}, {320}, {5, 1}, {3, 96}, {130, 257}, {4, 3, 160}};
  for (const GatherFormat gather : kAll) {
    for (const std::vector<int64_t>& shape : shapes) {
      const absl::StatusOr<ScaleBlocks> blocks = ScaleBlocksOf(gather, shape);
      if (!blocks.ok() || gather == GatherFormat::kStored) continue;
      int64_t elements = 1;
      for (const int64_t size : shape) elements *= size;
      for (const int64_t stretch : {elements, int64_t{256}, int64_t{1}}) {
        std::map<int64_t, int> begins;
        int64_t next = 0;
        for (int64_t first = 0; first < elements; first += stretch) {
          const int64_t num = std::min(stretch, elements - first);
          ForEachPiece(*blocks, first, num, [&](int64_t offset, int64_t size, int64_t block, bool is_first) {
            ASSERT_EQ(first + offset, next);
            ASSERT_GT(size, 0);
            for (int64_t e = next; e < next + size; ++e) {
              ASSERT_EQ(block, BlockOf(gather, shape.empty() ? 1 : shape.back(), e));
            }
            if (is_first) {
              ASSERT_EQ(begins[block]++, 0);
            }
            next += size;
          });
          ASSERT_EQ(next, first + num);
        }
        ASSERT_EQ(static_cast<int64_t>(begins.size()), blocks->num_blocks) << GatherFormatName(gather);
        int64_t scales = 1;
        for (const int64_t size : ScaleShape(gather, shape)) scales *= size;
        ASSERT_EQ(scales, blocks->num_blocks) << GatherFormatName(gather);
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
