// The loops of kernels/encode/encode.h, once its arguments have been checked. REQUIRES: what Encode and Decode check.
#pragma once

#include "kernels/encode/encode.h"

namespace shardmesh::encode_internal {

// An array as the loops see it.
struct Extent {
  int64_t rows = 0, columns = 0;
  int64_t elements() const { return rows * columns; }
};

// Formats of weights and states: the optimizer step's own tiles.
void EncodeStored(const CodeSpec& spec, int64_t elements, const float* array, void* codes, void* extra);
void DecodeStored(const CodeSpec& spec, int64_t elements, const void* codes, const void* extra, float* array);

void EncodeInt8Row(const CodeSpec& spec, Extent extent, const float* array, uint8_t* codes, float* scales);
void DecodeInt8Row(Extent extent, const uint8_t* codes, const float* scales, float* array);

inline constexpr int64_t kNf4Block = 64, kNf4ScalerBlock = 256, kFp8BlockSide = 128, kMxBlock = 32;

struct Nf4Parts {
  uint8_t* codes;
  int8_t* scales;
  float* factors;
  float* mean;
};
void EncodeNf4(int64_t elements, const float* array, const float* mean, const Nf4Parts& parts);
void DecodeNf4(int64_t elements, const uint8_t* codes, const int8_t* scales, const float* factors, float mean,
               float* array);

// All blocks have the size of `block`, but at the edges.
void EncodeFloat8(const CodeSpec& spec, Extent extent, Extent block, const float* array, uint8_t* codes,
                  absl::Span<float> scales);
float Float8ScaleOf(const CodeSpec& spec, float largest);

// An element of an array in fp32 or bf16.
inline float ValueAt(Format format, const void* values, int64_t i) {
  return format == Format::kFp32 ? static_cast<const float*>(values)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(values)[i]);
}
void CastFloat8(const CodeSpec& spec, float scale, Format format, const void* values, int64_t elements, uint8_t* codes);
void DecodeFloat8(const CodeSpec& spec, Extent extent, Extent block, const uint8_t* codes, const float* scales,
                  float* array);

void EncodeMx8(const CodeSpec& spec, int64_t elements, const float* array, uint8_t* codes, uint8_t* scales);
void DecodeMx8(int64_t elements, const uint8_t* codes, const uint8_t* scales, float* array);

}  // namespace shardmesh::encode_internal
