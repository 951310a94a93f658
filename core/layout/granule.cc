#include "core/layout/granule.h"

#include <numeric>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/format/format.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kForms =
    "flat:N (N a multiple of 64), rows:N, both up to 2^32, block:N (N a multiple of 8 up to 65536) or whole";

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string ShapeText(absl::Span<const int64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ","), "]"); }

absl::Status Validate(const Granule& granule) {
  const int64_t size = granule.size;
  bool good = size >= 1 && size <= kMaxGranuleSize;
  switch (granule.kind) {
    case GranuleKind::kFlat:
      good = good && size % kGroupElements == 0;
      break;
    case GranuleKind::kRows:
      break;
    case GranuleKind::kBlock:
      good = good && size % 8 == 0 && size <= kMaxBlockSide;
      break;
    case GranuleKind::kWhole:
      good = size == 0;
      break;
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("granule ", granule.ToString(), " is none: ", kForms));
}

}  // namespace

absl::string_view GranuleKindName(GranuleKind kind) {
  switch (kind) {
    case GranuleKind::kFlat:
      return "flat";
    case GranuleKind::kRows:
      return "rows";
    case GranuleKind::kBlock:
      return "block";
    case GranuleKind::kWhole:
      return "whole";
  }
  return "unknown";
}

std::string Granule::ToString() const {
  return kind == GranuleKind::kWhole ? "whole" : absl::StrCat(GranuleKindName(kind), ":", size);
}

absl::StatusOr<Granule> ParseGranule(absl::string_view text) {
  Granule granule;
  if (text == "whole") return Granule{GranuleKind::kWhole, 0};
  const size_t colon = text.find(':');
  const absl::string_view kind = text.substr(0, colon);
  bool good = colon != text.npos && absl::SimpleAtoi(text.substr(colon + 1), &granule.size);
  if (kind == "flat") {
    granule.kind = GranuleKind::kFlat;
  } else if (kind == "rows") {
    granule.kind = GranuleKind::kRows;
  } else if (kind == "block") {
    granule.kind = GranuleKind::kBlock;
  } else {
    good = false;
  }
  if (!good) {
    return absl::InvalidArgumentError(
        absl::StrCat("granule \"", absl::CHexEscape(text.substr(0, 80)), "\" is none: ", kForms));
  }
  RETURN_IF_ERROR(Validate(granule));
  return granule;
}

absl::StatusOr<int64_t> CheckedElements(absl::Span<const int64_t> shape) {
  if (shape.size() > kMaxTensorDims) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape of ", shape.size(), " dimensions; at most ", kMaxTensorDims, " are supported"));
  }
  int64_t elements = 1;
  bool empty = false, large = false;
  for (const int64_t size : shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ShapeText(shape), " has the size ", size, "; at least 0"));
    }
    empty = empty || size == 0;
    large = large || size > kMaxTensorElements / elements;
    if (!large && size > 0) elements *= size;
  }
  if (empty) return 0;
  if (!large) return elements;
  return absl::ResourceExhaustedError(
      absl::StrCat("shape ", ShapeText(shape), " has more than ", kMaxTensorElements, " elements; split the tensor"));
}

absl::StatusOr<GranuleCut> CutIntoGranules(absl::Span<const int64_t> shape, const Granule& granule) {
  RETURN_IF_ERROR(Validate(granule));
  GranuleCut cut;
  ASSIGN_OR_RETURN(cut.num_elements, CheckedElements(shape));
  if (granule.kind != GranuleKind::kFlat && shape.size() < 2) {
    return absl::InvalidArgumentError(absl::StrCat("granule ", granule.ToString(), " of a tensor of shape ",
                                                   ShapeText(shape),
                                                   ": it needs two dimensions; give this tensor flat:256"));
  }
  if (cut.num_elements == 0) return cut;
  if (granule.kind == GranuleKind::kFlat) {
    cut.granule_elements = granule.size;
  } else if (granule.kind == GranuleKind::kBlock) {
    const int64_t rows = shape[shape.size() - 2], columns = shape.back();
    cut.granule_elements = granule.size * granule.size;
    cut.num_granules =
        cut.num_elements / (rows * columns) * CeilDiv(rows, granule.size) * CeilDiv(columns, granule.size);
    return cut;
  } else {
    const int64_t rows = granule.kind == GranuleKind::kRows ? granule.size : shape[shape.size() - 2];
    // At most 2^32 * 2^40 * 2^6: beyond 64 bits only for groups of more rows than any tensor has.
    if (rows > kMaxTensorElements / shape.back()) {
      return absl::InvalidArgumentError(absl::StrCat("granule ", granule.ToString(), " of rows of ", shape.back(),
                                                     " elements has more than ", kMaxTensorElements, " elements"));
    }
    cut.owned = granule.kind == GranuleKind::kWhole && cut.num_elements == rows * shape.back();
    cut.granule_elements = cut.owned ? CeilDiv(cut.num_elements, kOwnedAlignment) * kOwnedAlignment
                                     : std::lcm(rows * shape.back(), kGroupElements);
  }
  cut.num_granules = CeilDiv(cut.num_elements, cut.granule_elements);
  return cut;
}

}  // namespace shardmesh
