#include "core/format/format.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {

namespace {
constexpr Format kFormats[] = {Format::kFp32, Format::kBf16, Format::kBf16Sr};
}  // namespace

absl::string_view FormatName(Format format) {
  switch (format) {
    case Format::kFp32:
      return "fp32";
    case Format::kBf16:
      return "bf16";
    case Format::kBf16Sr:
      return "bf16_sr";
  }
  return "unknown";
}

absl::StatusOr<Format> ParseFormat(absl::string_view name) {
  std::string known;
  for (Format format : kFormats) {
    if (FormatName(format) == name) return format;
    absl::StrAppend(&known, known.empty() ? "" : ", ", FormatName(format));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown format \"", name, "\"; the known ones are ", known));
}

}  // namespace shardmesh
