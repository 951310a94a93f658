#include "core/format/numeric_formats.h"

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kWeightNames[] = {"fp32", "bf16", "bf16_sr", "bf16+16", "bf16+8sr", "int8_row", "nf4"};
constexpr absl::string_view kStateNames[] = {"fp32", "bf16_sr", "dyn8", "dyn4", "fp8", "fp8x32"};

template <class Enum>
absl::StatusOr<Enum> Parse(absl::string_view what, absl::Span<const absl::string_view> names, absl::string_view name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", absl::CHexEscape(name.substr(0, 40)), "\" is no format of ",
                                                 what, "; there are ", absl::StrJoin(names, ", ")));
}

}  // namespace

absl::string_view WeightFormatName(WeightFormat format) { return kWeightNames[static_cast<int>(format)]; }
absl::string_view StateFormatName(StateFormat format) { return kStateNames[static_cast<int>(format)]; }

absl::StatusOr<WeightFormat> ParseWeightFormat(absl::string_view name) {
  return Parse<WeightFormat>("weights", kWeightNames, name);
}
absl::StatusOr<StateFormat> ParseStateFormat(absl::string_view name) {
  return Parse<StateFormat>("states", kStateNames, name);
}

StoredLayout LayoutOf(WeightFormat format, int64_t row_elements) {
  switch (format) {
    case WeightFormat::kFp32:
      return {{4}, {}};
    case WeightFormat::kBf16:
    case WeightFormat::kBf16Sr:
      return {{2}, {}};
    case WeightFormat::kBf16Plus16:
      return {{2}, {2}};
    case WeightFormat::kBf16Plus8Sr:
      return {{2}, {1}};
    case WeightFormat::kInt8Row:
      return {{1}, {4, row_elements}};
    case WeightFormat::kNf4:
      return {{1, 2}, {4, 64}};
  }
  return {};
}

StoredLayout LayoutOf(StateFormat format) {
  switch (format) {
    case StateFormat::kFp32:
      return {{4}, {}};
    case StateFormat::kBf16Sr:
      return {{2}, {}};
    case StateFormat::kDyn8:
    case StateFormat::kFp8:
      return {{1}, {4, 256}};
    case StateFormat::kDyn4:
      return {{1, 2}, {4, 128}};
    case StateFormat::kFp8x32:
      return {{1}, {2, 32}};
  }
  return {};
}

}  // namespace shardmesh
