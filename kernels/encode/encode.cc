#include "kernels/encode/encode.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/format/format.h"
#include "kernels/cpu/fp_environment.h"
#include "kernels/encode/encode_arrays.h"

namespace shardmesh {
namespace {

using encode_internal::Extent;

constexpr absl::string_view kNames[] = {"fp32", "bf16", "bf16_sr", "bf16+16",    "bf16+8sr", "int8_row",  "nf4", "dyn8",
                                        "dyn4", "fp8",  "fp8x32",  "fp8_tensor", "fp8_row",  "fp8_block", "mx8"};
constexpr int64_t kMostElements = int64_t{1} << 62;
constexpr uint64_t kDrawAlignment = 256;

int64_t Blocks(int64_t elements, int64_t block) { return (elements + block - 1) / block; }

bool HoldsNotFinite(CodeFormat format) { return format <= CodeFormat::kBf16Plus8Sr; }
bool IsState(CodeFormat format) { return format >= CodeFormat::kDyn8 && format <= CodeFormat::kFp8x32; }
bool Draws(const CodeSpec& spec) {
  return spec.format == CodeFormat::kBf16Sr || spec.format == CodeFormat::kBf16Plus8Sr ||
         (spec.format == CodeFormat::kInt8Row && spec.stochastic) ||
         (spec.format == CodeFormat::kFp8x32 && !spec.is_signed && spec.stochastic);
}

absl::StatusOr<Extent> ExtentOf(const CodeSpec& spec, absl::Span<const int64_t> dims) {
  Extent extent = {1, dims.empty() ? 1 : dims.back()};
  int64_t elements = 1;
  for (const int64_t size : dims) {
    if (size < 0 || (size > 0 && elements > kMostElements / size)) {
      return absl::InvalidArgumentError(absl::StrCat("an array of the shape [", absl::StrJoin(dims, ", "),
                                                     "]; sizes are at least 0, and elements at most 2^62"));
    }
    elements *= size;
  }
  for (size_t i = 0; i + 1 < dims.size(); ++i) extent.rows *= dims[i];
  if (spec.format == CodeFormat::kFp8Block && dims.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat("fp8_block codes matrices, not an array of the shape [",
                                                   absl::StrJoin(dims, ", "), "]; give it two dimensions"));
  }
  if (spec.format == CodeFormat::kMx8 && extent.columns % encode_internal::kMxBlock != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("mx8 codes rows of whole blocks of 32 elements; the last dimension of [",
                     absl::StrJoin(dims, ", "), "] is no multiple of 32"));
  }
  return extent;
}

// The block that has one scale.
Extent Float8Block(CodeFormat format, Extent extent) {
  const int64_t columns = std::max<int64_t>(extent.columns, 1);
  if (format == CodeFormat::kFp8Tensor) return {std::max<int64_t>(extent.rows, 1), columns};
  if (format == CodeFormat::kFp8Row) return {1, columns};
  return {encode_internal::kFp8BlockSide, encode_internal::kFp8BlockSide};
}

void AddPublishedParts(const CodeSpec& spec, const std::vector<int64_t>& dims, Extent extent,
                       std::vector<CodePart>& parts) {
  const int64_t n = extent.elements();
  std::vector<int64_t> rows(dims.begin(), dims.end() - (dims.empty() ? 0 : 1));
  switch (spec.format) {
    case CodeFormat::kInt8Row:
      parts = {{"codes", ElementType::kInt8, dims}, {"scales", ElementType::kFloat32, rows}};
      return;
    case CodeFormat::kNf4: {
      const int64_t blocks = Blocks(n, encode_internal::kNf4Block);
      parts = {{"codes", ElementType::kUint8, {Blocks(n, 2)}},
               {"scales", ElementType::kInt8, {blocks}},
               {"factors", ElementType::kFloat32, {Blocks(blocks, encode_internal::kNf4ScalerBlock)}},
               {"mean", ElementType::kFloat32, {}}};
      return;
    }
    case CodeFormat::kFp8Tensor:
      rows.clear();
      break;
    case CodeFormat::kFp8Row:
      rows.resize(dims.size(), 1);
      break;
    case CodeFormat::kFp8Block:
      rows = {Blocks(dims[0], encode_internal::kFp8BlockSide), Blocks(dims[1], encode_internal::kFp8BlockSide)};
      break;
    default:  // mx8
      rows.push_back(extent.columns / encode_internal::kMxBlock);
      parts = {{"codes", ElementType::kUint8, dims}, {"scales", ElementType::kUint8, rows}};
      return;
  }
  parts = {{"codes", ElementType::kUint8, dims}, {"scales", ElementType::kFloat32, rows}};
}

std::string Name(const CodeSpec& spec) { return std::string(CodeFormatName(spec.format)); }

// InvalidArgument: null where there are elements, or misaligned.
absl::Status CheckPart(const CodeSpec& spec, absl::string_view name, const void* begin, int64_t count, int64_t bytes) {
  if (count == 0 || (begin != nullptr && reinterpret_cast<uintptr_t>(begin) % bytes == 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(Name(spec), ": the memory of ", name, " begins at address ",
                                                 reinterpret_cast<uintptr_t>(begin), "; it must be a multiple of ",
                                                 bytes, ", and not 0"));
}

// InvalidArgument: not as many as there are parts, or as CheckPart.
template <class Pointer>
absl::Status CheckMemory(const CodeSpec& spec, const std::vector<CodePart>& parts, absl::Span<const Pointer> memory,
                         const float* array, int64_t elements) {
  if (memory.size() != parts.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(spec), " has ", parts.size(), " parts; there are ", memory.size()));
  }
  RETURN_IF_ERROR(CheckPart(spec, "the array", array, elements, sizeof(float)));
  for (size_t i = 0; i < parts.size(); ++i) {
    RETURN_IF_ERROR(CheckPart(spec, parts[i].name, memory[i], parts[i].NumElements(), BytesOf(parts[i].type)));
  }
  return absl::OkStatus();
}

absl::Status CheckDraws(const CodeSpec& spec) {
  if (!Draws(spec)) return absl::OkStatus();
  if (spec.step < 0) return absl::InvalidArgumentError(absl::StrCat("the step is ", spec.step, "; the least is 0"));
  if (spec.format == CodeFormat::kInt8Row || spec.first_element % kDrawAlignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the array begins at element ", spec.first_element,
                                                 " of its tensor; it must be a multiple of ", kDrawAlignment));
}

absl::Status CheckValues(const CodeSpec& spec, int64_t elements, const float* array) {
  if (HoldsNotFinite(spec.format)) return absl::OkStatus();
  const bool no_sign = IsState(spec.format) && !spec.is_signed;
  for (int64_t i = 0; i < elements; ++i) {
    if ((FloatBits(array[i]) & 0x7FFFFFFFu) >= 0x7F800000u) {
      return absl::InvalidArgumentError(
          absl::StrCat("element ", i, " is ", array[i], "; ", Name(spec), " holds finite numbers alone"));
    }
    if (no_sign && array[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat("element ", i, " is ", array[i], "; ", Name(spec),
                                                     " without a sign holds numbers of at least 0"));
    }
  }
  return absl::OkStatus();
}

// Not inlined: kernels/cpu/fp_environment.h.
__attribute__((noinline)) void EncodeChecked(const CodeSpec& spec, Extent extent, const std::vector<CodePart>& parts,
                                             const float* array, absl::Span<void* const> memory, const float* mean) {
  auto* codes = static_cast<uint8_t*>(memory[0]);
  void* extra = memory.size() > 1 ? memory[1] : nullptr;
  auto* scales = static_cast<float*>(extra);
  switch (spec.format) {
    case CodeFormat::kInt8Row:
      encode_internal::EncodeInt8Row(spec, extent, array, codes, scales);
      break;
    case CodeFormat::kNf4:
      encode_internal::EncodeNf4(
          extent.elements(), array, mean,
          {codes, static_cast<int8_t*>(extra), static_cast<float*>(memory[2]), static_cast<float*>(memory[3])});
      break;
    case CodeFormat::kFp8Tensor:
    case CodeFormat::kFp8Row:
    case CodeFormat::kFp8Block:
      encode_internal::EncodeFloat8(spec, extent, Float8Block(spec.format, extent), array, codes,
                                    absl::MakeSpan(scales, parts[1].NumElements()));
      break;
    case CodeFormat::kMx8:
      encode_internal::EncodeMx8(spec, extent.elements(), array, codes, static_cast<uint8_t*>(extra));
      break;
    default:
      encode_internal::EncodeStored(spec, extent.elements(), array, codes, extra);
  }
}

__attribute__((noinline)) void DecodeChecked(const CodeSpec& spec, Extent extent, absl::Span<const void* const> memory,
                                             float* array) {
  const auto* codes = static_cast<const uint8_t*>(memory[0]);
  const void* extra = memory.size() > 1 ? memory[1] : nullptr;
  const auto* scales = static_cast<const float*>(extra);
  switch (spec.format) {
    case CodeFormat::kInt8Row:
      encode_internal::DecodeInt8Row(extent, codes, scales, array);
      break;
    case CodeFormat::kNf4:
      encode_internal::DecodeNf4(extent.elements(), codes, static_cast<const int8_t*>(extra),
                                 static_cast<const float*>(memory[2]), *static_cast<const float*>(memory[3]), array);
      break;
    case CodeFormat::kFp8Tensor:
    case CodeFormat::kFp8Row:
    case CodeFormat::kFp8Block:
      encode_internal::DecodeFloat8(spec, extent, Float8Block(spec.format, extent), codes, scales, array);
      break;
    case CodeFormat::kMx8:
      encode_internal::DecodeMx8(extent.elements(), codes, static_cast<const uint8_t*>(extra), array);
      break;
    default:
      encode_internal::DecodeStored(spec, extent.elements(), codes, extra, array);
  }
}

}  // namespace

absl::string_view CodeFormatName(CodeFormat format) { return kNames[static_cast<int>(format)]; }

absl::StatusOr<CodeFormat> ParseCodeFormat(absl::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<CodeFormat>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", absl::CHexEscape(name.substr(0, 40)),
                                                 "\" is no format; there are ", absl::StrJoin(kNames, ", ")));
}

CodeFormat CodeFormatOf(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp32:
      return CodeFormat::kFp32;
    case WeightFormat::kBf16:
    case WeightFormat::kBf16Sr:
      return CodeFormat::kBf16;
    case WeightFormat::kBf16Plus16:
      return CodeFormat::kBf16Plus16;
    case WeightFormat::kBf16Plus8Sr:
      return CodeFormat::kBf16Plus8Sr;
    case WeightFormat::kInt8Row:
      return CodeFormat::kInt8Row;
    case WeightFormat::kNf4:
      return CodeFormat::kNf4;
  }
  return CodeFormat::kFp32;
}

CodeFormat CodeFormatOf(StateFormat format) {
  switch (format) {
    case StateFormat::kFp32:
      return CodeFormat::kFp32;
    case StateFormat::kBf16Sr:
      return CodeFormat::kBf16;
    case StateFormat::kDyn8:
      return CodeFormat::kDyn8;
    case StateFormat::kDyn4:
      return CodeFormat::kDyn4;
    case StateFormat::kFp8:
      return CodeFormat::kFp8;
    case StateFormat::kFp8x32:
      return CodeFormat::kFp8x32;
  }
  return CodeFormat::kFp32;
}

int64_t BytesOf(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kUint16:
    case ElementType::kInt16:
      return 2;
    default:
      return 1;
  }
}

int64_t CodePart::NumElements() const {
  int64_t elements = 1;
  for (const int64_t size : dims) elements *= size;
  return elements;
}

absl::StatusOr<std::vector<CodePart>> PartsOf(const CodeSpec& spec, absl::Span<const int64_t> dims) {
  ASSIGN_OR_RETURN(const Extent extent, ExtentOf(spec, dims));
  const int64_t n = extent.elements();
  const std::vector<int64_t> shape(dims.begin(), dims.end());
  std::vector<CodePart> parts;
  switch (spec.format) {
    case CodeFormat::kFp32:
      return std::vector<CodePart>{{"codes", ElementType::kFloat32, shape}};
    case CodeFormat::kBf16:
    case CodeFormat::kBf16Sr:
      return std::vector<CodePart>{{"codes", ElementType::kUint16, shape}};
    case CodeFormat::kBf16Plus16:
      return std::vector<CodePart>{{"codes", ElementType::kUint16, shape}, {"remainder", ElementType::kInt16, shape}};
    case CodeFormat::kBf16Plus8Sr:
      return std::vector<CodePart>{{"codes", ElementType::kUint16, shape}, {"remainder", ElementType::kInt8, shape}};
    case CodeFormat::kDyn8:
    case CodeFormat::kFp8:
      return std::vector<CodePart>{{"codes", ElementType::kUint8, shape},
                                   {"scales", ElementType::kFloat32, {Blocks(n, 256)}}};
    case CodeFormat::kFp8x32:
      return std::vector<CodePart>{{"codes", ElementType::kUint8, shape},
                                   {"scales", ElementType::kUint16, {Blocks(n, 32)}}};
    case CodeFormat::kDyn4:
      return std::vector<CodePart>{{"codes", ElementType::kUint8, {Blocks(n, 2)}},
                                   {"scales", ElementType::kFloat32, {Blocks(n, 128)}}};
    default:
      AddPublishedParts(spec, shape, extent, parts);
      return parts;
  }
}

absl::Status Encode(const CodeSpec& spec, absl::Span<const int64_t> dims, const float* array,
                    absl::Span<void* const> memory, const float* mean) {
  ASSIGN_OR_RETURN(const Extent extent, ExtentOf(spec, dims));
  ASSIGN_OR_RETURN(const std::vector<CodePart> parts, PartsOf(spec, dims));
  const int64_t n = extent.elements();
  RETURN_IF_ERROR(CheckMemory(spec, parts, memory, array, n));
  RETURN_IF_ERROR(CheckDraws(spec));
  RETURN_IF_ERROR(CheckValues(spec, n, array));
  if (spec.format == CodeFormat::kNf4 && mean != nullptr && !std::isfinite(*mean)) {
    return absl::InvalidArgumentError(absl::StrCat("nf4: mean is ", *mean, "; it is a finite fp32 number"));
  }
  const ScopedFpEnvironment environment;
  EncodeChecked(spec, extent, parts, array, memory, mean);
  return absl::OkStatus();
}

float Fp8Scale(const CodeSpec& spec, float largest) {
  const ScopedFpEnvironment environment;
  return encode_internal::Float8ScaleOf(spec, largest);
}

absl::Status CastFp8(const CodeSpec& spec, float scale, Format format, const void* values, int64_t elements,
                     uint8_t* codes) {
  if (spec.format != CodeFormat::kFp8Tensor) {
    return absl::InvalidArgumentError(absl::StrCat(Name(spec), " is not cast with one scale; fp8_tensor is"));
  }
  if (!(scale > 0 && scale <= FLT_MAX)) {
    return absl::InvalidArgumentError(absl::StrCat("the scale is ", scale, "; it is a number above 0"));
  }
  if (elements < 0)
    return absl::InvalidArgumentError(absl::StrCat("there are ", elements, " elements; 0 is the least"));
  RETURN_IF_ERROR(CheckPart(spec, "the values", values, elements, BytesPerElement(format)));
  RETURN_IF_ERROR(CheckPart(spec, "the codes", codes, elements, 1));
  for (int64_t i = 0; i < elements; ++i) {
    const float value = encode_internal::ValueAt(format, values, i);
    if ((FloatBits(value) & 0x7FFFFFFFu) < 0x7F800000u) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("element ", i, " is ", value, "; ", Name(spec), " holds finite numbers alone"));
  }
  const ScopedFpEnvironment environment;
  encode_internal::CastFloat8(spec, scale, format, values, elements, codes);
  return absl::OkStatus();
}

absl::Status Decode(const CodeSpec& spec, absl::Span<const int64_t> dims, absl::Span<const void* const> memory,
                    float* array) {
  ASSIGN_OR_RETURN(const Extent extent, ExtentOf(spec, dims));
  ASSIGN_OR_RETURN(const std::vector<CodePart> parts, PartsOf(spec, dims));
  const int64_t n = extent.elements();
  RETURN_IF_ERROR(CheckMemory(spec, parts, memory, array, n));
  const ScopedFpEnvironment environment;
  DecodeChecked(spec, extent, memory, array);
  return absl::OkStatus();
}

}  // namespace shardmesh
