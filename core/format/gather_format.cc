#include "core/format/gather_format.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kNames[] = {"stored", "fp8_tensor", "fp8_row", "fp8_block", "mx8", "int8_row", "nf4"};
constexpr int64_t kFp8BlockSide = 128, kMxBlock = 32;

absl::Status Misfit(GatherFormat gather, absl::Span<const int64_t> shape, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("shape [", absl::StrJoin(shape, ","), "] cannot be gathered as ",
                                                 GatherFormatName(gather), ", which codes ", wanted,
                                                 "; take another format, or stored"));
}

}  // namespace

absl::string_view GatherFormatName(GatherFormat format) { return kNames[static_cast<int>(format)]; }

absl::StatusOr<GatherFormat> ParseGatherFormat(absl::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<GatherFormat>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", absl::CHexEscape(name.substr(0, 40)),
                                                 "\" is no gather format; there are ", absl::StrJoin(kNames, ", ")));
}

Format GatheredFormat(WeightFormat format) {
  const bool codes = format == WeightFormat::kInt8Row || format == WeightFormat::kNf4;
  return codes || format == WeightFormat::kFp32 ? Format::kFp32 : Format::kBf16;
}

GatherFormat GatherOf(WeightFormat weights, GatherFormat gather) {
  if (gather != GatherFormat::kStored) return gather;
  return weights == WeightFormat::kInt8Row ? GatherFormat::kInt8Row
         : weights == WeightFormat::kNf4   ? GatherFormat::kNf4
                                           : gather;
}

bool IsQuantized(WeightFormat weights, GatherFormat gather) {
  const GatherFormat made = GatherOf(weights, gather);
  const bool copied = weights == WeightFormat::kInt8Row && made == GatherFormat::kInt8Row;
  return made != GatherFormat::kStored && !copied;
}

int64_t GatheredCodeBytes(Format stored, GatherFormat gather, int64_t num_elements) {
  if (gather == GatherFormat::kStored) return num_elements * BytesPerElement(stored);
  return gather == GatherFormat::kNf4 ? (num_elements + 1) / 2 : num_elements;
}

int64_t GatheredScaleBytes(GatherFormat gather) {
  if (gather == GatherFormat::kStored) return 0;
  return gather == GatherFormat::kMx8 || gather == GatherFormat::kNf4 ? 1 : 4;
}

int64_t Nf4FactorsOffset(int64_t num_scales) { return (num_scales + 3) / 4 * 4; }

int64_t Nf4MeanOffset(int64_t num_scales) {
  return Nf4FactorsOffset(num_scales) + (num_scales + kNf4FactorBlocks - 1) / kNf4FactorBlocks * 4;
}

int64_t GatheredScalesBytes(GatherFormat gather, int64_t num_scales) {
  return gather == GatherFormat::kNf4 ? Nf4MeanOffset(num_scales) + 4 : num_scales * GatheredScaleBytes(gather);
}

absl::StatusOr<ScaleBlocks> ScaleBlocksOf(GatherFormat gather, absl::Span<const int64_t> shape) {
  if (gather == GatherFormat::kStored) return ScaleBlocks();
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  if (elements == 0) return Misfit(gather, shape, "tensors with elements");
  const int64_t columns = shape.empty() ? 1 : shape.back();
  switch (gather) {
    case GatherFormat::kFp8Tensor:
      return ScaleBlocks{elements, 1, elements, 1};
    case GatherFormat::kFp8Row:
    case GatherFormat::kInt8Row:
      return ScaleBlocks{columns, 1, columns, elements / columns};
    case GatherFormat::kFp8Block: {
      if (shape.size() != 2) return Misfit(gather, shape, "matrices");
      ScaleBlocks blocks{columns, kFp8BlockSide, std::min(kFp8BlockSide, columns), 0};
      blocks.num_blocks = (shape[0] + kFp8BlockSide - 1) / kFp8BlockSide * blocks.across();
      return blocks;
    }
    case GatherFormat::kMx8:
      if (columns % kMxBlock != 0) return Misfit(gather, shape, "rows of multiples of 32 elements");
      return ScaleBlocks{elements, 1, kMxBlock, elements / kMxBlock};
    case GatherFormat::kNf4:
      return ScaleBlocks{elements, 1, std::min(kNf4BlockElements, elements),
                         (elements + kNf4BlockElements - 1) / kNf4BlockElements};
    case GatherFormat::kStored:
      break;
  }
  return ScaleBlocks();
}

std::vector<int64_t> ScaleShape(GatherFormat gather, absl::Span<const int64_t> shape) {
  std::vector<int64_t> dims(shape.begin(), shape.end());
  switch (gather) {
    case GatherFormat::kFp8Row:
      if (!dims.empty()) dims.back() = 1;
      return dims;
    case GatherFormat::kInt8Row:
      if (!dims.empty()) dims.pop_back();
      return dims;
    case GatherFormat::kFp8Block:
      for (int64_t& size : dims) size = (size + kFp8BlockSide - 1) / kFp8BlockSide;
      return dims;
    case GatherFormat::kMx8:
      dims.back() /= kMxBlock;
      return dims;
    case GatherFormat::kNf4:
      return {ScaleBlocksOf(gather, shape)->num_blocks};
    default:
      return {};
  }
}

}  // namespace shardmesh
