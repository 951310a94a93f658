// Formats in which weights are published, and int8_row.
#include <algorithm>

#include "kernels/encode/encode_arrays.h"
#include "kernels/rules/block_scales.h"
#include "kernels/rules/four_bit.h"
#include "kernels/rules/int8.h"
#include "kernels/tile/states.h"

namespace shardmesh::encode_internal {
namespace {

float Largest(const float* from, int64_t elements) {
  float largest = 0;
  for (int64_t i = 0; i < elements; ++i) largest = Max(largest, Abs(from[i]));
  return largest;
}

int64_t Blocks(int64_t elements, int64_t block) { return (elements + block - 1) / block; }

// Calls visit(offset, size, scale) for the piece of every row that lies in every block.
template <class Visit>
void ForEachPiece(Extent extent, Extent block, const Visit& visit) {
  const int64_t across = Blocks(extent.columns, block.columns);
  for (int64_t row = 0; row < extent.rows; ++row) {
    for (int64_t b = 0; b < across; ++b) {
      const int64_t column = b * block.columns, size = std::min(block.columns, extent.columns - column);
      visit(row * extent.columns + column, size, row / block.rows * across + b);
    }
  }
}

template <class Mini>
void EncodeFloat8As(const CodeSpec& spec, Extent extent, Extent block, const float* array, uint8_t* codes,
                    absl::Span<float> scales) {
  std::fill(scales.begin(), scales.end(), 0.0f);
  ForEachPiece(extent, block, [&](int64_t offset, int64_t size, int64_t scale) {
    scales[scale] = Max(scales[scale], Largest(array + offset, size));
  });
  for (float& each : scales) each = Float8ScaleOf(spec, each);
  ForEachPiece(extent, block, [&](int64_t offset, int64_t size, int64_t scale) {
    for (int64_t i = offset; i < offset + size; ++i) {
      codes[i] = static_cast<uint8_t>(EncodeMinifloat<Mini>(array[i] * scales[scale]));
    }
  });
}

template <class Mini>
void DecodeFloat8As(Extent extent, Extent block, const uint8_t* codes, const float* scales, float* array) {
  ForEachPiece(extent, block, [&](int64_t offset, int64_t size, int64_t scale) {
    for (int64_t i = offset; i < offset + size; ++i) {
      array[i] = Divide(DecodeAnyMinifloat<Mini, float>(uint32_t{codes[i]}), scales[scale]);
    }
  });
}

// The mean of the blocks' largest magnitudes, added in double in their order and rounded once.
float MeanOf(int64_t elements, const float* array) {
  double sum = 0;
  for (int64_t i = 0; i < elements; i += kNf4Block) sum += Largest(array + i, std::min(kNf4Block, elements - i));
  return elements == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(Blocks(elements, kNf4Block)));
}

}  // namespace

void EncodeInt8Row(const CodeSpec& spec, Extent extent, const float* array, uint8_t* codes, float* scales) {
  const PhiloxKey key = MakePhiloxKey(spec.seed, spec.purpose);
  for (int64_t row = 0; row < extent.rows; ++row) {
    const float largest = Largest(array + row * extent.columns, extent.columns);
    const float scale = spec.torchao ? TorchaoInt8Scale(largest) : Max(Divide(largest, kInt8Largest), kSmallestScale);
    const float inverse = TorchaoInt8Inverse(scale);
    scales[row] = scale;
    for (int64_t i = row * extent.columns; i < (row + 1) * extent.columns; ++i) {
      const float y = spec.torchao ? array[i] * inverse : Divide(array[i], scale);
      if (!spec.stochastic) {
        codes[i] = static_cast<uint8_t>(EncodeInt8(y));
        continue;
      }
      const uint32_t draw = Draw16(key, spec.step, spec.tensor, spec.first_element + static_cast<uint64_t>(i));
      codes[i] = static_cast<uint8_t>(EncodeInt8Stochastic(y, draw));
    }
  }
}

void DecodeInt8Row(Extent extent, const uint8_t* codes, const float* scales, float* array) {
  for (int64_t i = 0; i < extent.elements(); ++i) {
    array[i] = DecodeInt8<float>(uint32_t{codes[i]}) * scales[i / extent.columns];
  }
}

void EncodeNf4(int64_t elements, const float* array, const float* mean, const Nf4Parts& parts) {
  constexpr uint32_t kZero = 7;
  *parts.mean = mean != nullptr ? *mean : MeanOf(elements, array);
  for (int64_t block = 0; block < Blocks(elements, kNf4Block); ++block) {
    const int64_t begin = block * kNf4Block, end = std::min(begin + kNf4Block, elements);
    const float largest = Largest(array + begin, end - begin);
    const auto code = [&](int64_t i) {
      return i < end && largest > 0 ? EncodeFourBit<Nf4>(Divide(array[i], largest)) : kZero;
    };
    for (int64_t i = begin; i < end; i += 2) parts.codes[i / 2] = static_cast<uint8_t>(code(i) << 4 | code(i + 1));
  }
  const int64_t super = kNf4Block * kNf4ScalerBlock;
  for (int64_t begin = 0; begin < elements; begin += super) {
    const int64_t count = Blocks(std::min(super, elements - begin), kNf4Block);
    float centred[kNf4ScalerBlock];
    for (int64_t b = 0; b < count; ++b) {
      const int64_t at = begin + b * kNf4Block;
      centred[b] = Largest(array + at, std::min(kNf4Block, elements - at)) - *parts.mean;
    }
    const float largest = Largest(centred, count);
    const float factor = largest > 0 ? Divide(128.0f, largest) : 1.0f;
    parts.factors[begin / super] = factor;
    for (int64_t b = 0; b < count; ++b) {
      parts.scales[begin / kNf4Block + b] = static_cast<int8_t>(EncodeNf4Scale(centred[b] * factor));
    }
  }
}

void DecodeNf4(int64_t elements, const uint8_t* codes, const int8_t* scales, const float* factors, float mean,
               float* array) {
  for (int64_t i = 0; i < elements; ++i) {
    const int64_t block = i / kNf4Block;
    const float scale = Divide(static_cast<float>(scales[block]), factors[block / kNf4ScalerBlock]) + mean;
    const uint32_t code = (codes[i / 2] >> (i % 2 == 0 ? 4 : 0)) & 15u;
    array[i] = DecodeFourBit<Nf4, float>(code) * scale;
  }
}

void EncodeFloat8(const CodeSpec& spec, Extent extent, Extent block, const float* array, uint8_t* codes,
                  absl::Span<float> scales) {
  if (spec.format == CodeFormat::kFp8Tensor && spec.e5m2) {
    return EncodeFloat8As<E5M2>(spec, extent, block, array, codes, scales);
  }
  EncodeFloat8As<E4M3>(spec, extent, block, array, codes, scales);
}

float Float8ScaleOf(const CodeSpec& spec, float largest) {
  const bool e5m2 = spec.format == CodeFormat::kFp8Tensor && spec.e5m2;
  const float scale = e5m2 ? Float8Scale<E5M2>(largest) : Float8Scale<E4M3>(largest);
  return spec.power_of_two ? PowerOfTwoBelow(scale) : scale;
}

void CastFloat8(const CodeSpec& spec, float scale, Format format, const void* values, int64_t elements,
                uint8_t* codes) {
  for (int64_t i = 0; i < elements; ++i) {
    const float scaled = ValueAt(format, values, i) * scale;
    codes[i] = static_cast<uint8_t>(spec.e5m2 ? EncodeMinifloat<E5M2>(scaled) : EncodeMinifloat<E4M3>(scaled));
  }
}

void DecodeFloat8(const CodeSpec& spec, Extent extent, Extent block, const uint8_t* codes, const float* scales,
                  float* array) {
  if (spec.format == CodeFormat::kFp8Tensor && spec.e5m2) {
    return DecodeFloat8As<E5M2>(extent, block, codes, scales, array);
  }
  DecodeFloat8As<E4M3>(extent, block, codes, scales, array);
}

void EncodeMx8(const CodeSpec& spec, int64_t elements, const float* array, uint8_t* codes, uint8_t* scales) {
  for (int64_t begin = 0; begin < elements; begin += kMxBlock) {
    const float largest = Largest(array + begin, kMxBlock);
    const auto scale = spec.floor ? MxScaleFloor(largest) : MxScaleCeil(largest);
    scales[begin / kMxBlock] = static_cast<uint8_t>(scale.code);
    for (int64_t i = begin; i < begin + kMxBlock; ++i) {
      codes[i] = static_cast<uint8_t>(EncodeMinifloat<E4M3>(array[i] * scale.multiplier));
    }
  }
}

void DecodeMx8(int64_t elements, const uint8_t* codes, const uint8_t* scales, float* array) {
  for (int64_t i = 0; i < elements; ++i) {
    array[i] = DecodeAnyMinifloat<E4M3, float>(uint32_t{codes[i]}) * DecodeE8m0<float>(uint32_t{scales[i / kMxBlock]});
  }
}

}  // namespace shardmesh::encode_internal
