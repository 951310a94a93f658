// Writing a safetensors file (checkpoint/safetensors.h). Pure but for the file; thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/format/format.h"

namespace shardmesh {

struct NamedTensor {
  std::string name;
  Format format = Format::kFp32;  // bf16_sr is written as BF16: the rounding is no property of the bytes
  std::vector<int64_t> shape;
  absl::string_view bytes;  // borrowed; row-major, little-endian
  absl::string_view dtype;  // of the file format, in place of what `format` says; empty: that one
};

// Writes the file (WriteWholeFile) and returns its bytes. Errors as SafetensorsHead and WriteWholeFile.
absl::StatusOr<int64_t> WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata);

}  // namespace shardmesh
