// Arrays of fp32 to codes and back, in every format there is: those of weights and states
// (core/format/numeric_formats.h), bit for bit as the optimizer step stores them, and those in which weights are
// published. For checking, and for whatever is no hot path: plain loops over the element rules of kernels/rules/, one
// thread.
//
//   published   codes               scales                                            value
//   nf4         2 in a byte         int8 of 64 elements, under a factor for 256 of    level * (scale / factor + mean)
//                                   them and one mean (torchao's NF4Tensor)
//   fp8_tensor  E4M3 or E5M2        one float                                         code / scale
//   fp8_row     E4M3                a float for each row                              code / scale
//   fp8_block   E4M3                a float for 128 x 128 elements of a matrix        code / scale
//   mx8         E4M3                E8M0 for 32 elements of a row                     code * 2^(scale - 127)
//
// A row is what the last dimension counts. Blocks at an edge may be smaller, but not mx8's. Two choices of ours in nf4,
// where torchao has NaN: a block of zeros becomes zeros, and scales that are all equal have the factor 1. Where scales
// are powers of two, numbers that round up beyond FLT_MAX decode to infinity, as torchao's do.
//
// Thread-safe for calls that share no output. Memory is borrowed for the call; parts must not overlap the array. The
// processor's floating-point environment is set for the call and restored.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/base/philox.h"
#include "core/format/format.h"
#include "core/format/numeric_formats.h"

namespace shardmesh {

enum class CodeFormat {
  kFp32,
  kBf16,
  kBf16Sr,
  kBf16Plus16,
  kBf16Plus8Sr,
  kInt8Row,
  kNf4,
  kDyn8,
  kDyn4,
  kFp8,
  kFp8x32,
  kFp8Tensor,
  kFp8Row,
  kFp8Block,
  kMx8
};

absl::string_view CodeFormatName(CodeFormat format);
// InvalidArgument: no such format; the message lists them.
absl::StatusOr<CodeFormat> ParseCodeFormat(absl::string_view name);
// The format whose parts are those of weights or states as they are stored: to decode them, and to encode initial
// values, which are rounded to nearest where steps round stochastically (bf16_sr: bf16) unless the codes are others
// (bf16+8sr). Of nf4 the codes alone: its scales are stored in one part (StoreNf4 of kernels/encode/gathered.h).
CodeFormat CodeFormatOf(WeightFormat format);
CodeFormat CodeFormatOf(StateFormat format);

// A format and what it leaves open. Options of other formats are not looked at.
struct CodeSpec {
  CodeFormat format = CodeFormat::kFp32;
  bool is_signed = true;  // dyn8, dyn4, fp8, fp8x32: first moments; else second ones, which are never negative
  bool torchao = false;   // dyn8, dyn4, fp8: as torchao_codec.h; int8_row: as torchao's (kernels/rules/int8.h)
  bool e5m2 = false;      // fp8_tensor
  bool power_of_two = false;  // fp8_tensor, fp8_row, fp8_block: scales are rounded down to one
  bool floor = false;         // mx8: torchao's mode FLOOR; else RCEIL
  bool stochastic = false;    // int8_row; second moments in fp8x32: rounded stochastically, else to nearest

  // The draws of bf16_sr, bf16+8sr and whatever is stochastic (core/base/philox.h).
  uint64_t seed = 0;
  int64_t step = 1;
  uint32_t tensor = 0;
  uint64_t first_element = 0;  // the array's first index in its tensor, a multiple of 256 (but for int8_row)
  DrawPurpose purpose = DrawPurpose::kWeightRounding;
};

enum class ElementType { kFloat32, kUint16, kInt16, kUint8, kInt8 };
int64_t BytesOf(ElementType type);

// One of the arrays that a quantized array consists of.
struct CodePart {
  const char* name;  // codes; remainder or scales; factors, mean
  ElementType type;
  std::vector<int64_t> dims;

  int64_t NumElements() const;
};

// The parts of an array of that shape, codes first. InvalidArgument: a negative size, more than 2^62 elements, or a
// shape that the format does not fit: fp8_block codes matrices, mx8 rows of a multiple of 32.
absl::StatusOr<std::vector<CodePart>> PartsOf(const CodeSpec& spec, absl::Span<const int64_t> dims);

// Writes the parts (in the order of PartsOf) of `array`. mean: of nf4, taken as given in place of the scales' own.
//   InvalidArgument: as PartsOf; null or misaligned memory, or not as many parts; a step below 0 or a first element
//   that is no multiple of 256 where there are draws; a value that the format cannot hold: NaN and infinity anywhere
//   but in fp32 and the formats with bf16, a negative one without a sign; a mean that is not finite. Nothing was
//   written.
absl::Status Encode(const CodeSpec& spec, absl::Span<const int64_t> dims, const float* array,
                    absl::Span<void* const> parts, const float* mean = nullptr);

// The scale that Encode gives fp8_tensor for an array of that largest magnitude, and fp8_row and fp8_block for a row or
// a block (spec: e5m2, power_of_two). So a scale is known from magnitudes that are compared across machines.
// REQUIRES: largest is finite and not negative.
float Fp8Scale(const CodeSpec& spec, float largest);

// Codes under a scale that is known: a run of an array's elements in fp32 or bf16 becomes what Encode gives for it in
// fp8_tensor, with Fp8Scale of the whole array's largest magnitude. No memory is allocated unless there is an error.
//   InvalidArgument: the spec is not fp8_tensor; a scale that is not finite or not above 0; fewer than 0 elements; null
//   or misaligned memory; a value that is NaN or infinite. Nothing was written.
absl::Status CastFp8(const CodeSpec& spec, float scale, Format format, const void* values, int64_t elements,
                     uint8_t* codes);

// The values, exactly as the format defines them; codes that Encode does not write are NaN or infinity where E4M3 and
// E5M2 have them, and in states what the optimizer step takes them for. InvalidArgument: as Encode, of shape and
// memory.
absl::Status Decode(const CodeSpec& spec, absl::Span<const int64_t> dims, absl::Span<const void* const> parts,
                    float* array);

}  // namespace shardmesh
