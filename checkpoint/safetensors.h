// The head of the safetensors file format (github.com/huggingface/safetensors): 8 bytes of little-endian header length,
// a JSON header padded with spaces to a multiple of 8; behind it the tensors' bytes lie without gaps, in the order
// given. Pure and thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardmesh {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // of the file format: "F32", "BF16", ...
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// Length and header. InvalidArgument: a name twice, the reserved name "__metadata__", or what is not UTF-8.
absl::StatusOr<std::string> SafetensorsHead(const std::vector<SafetensorsEntry>& entries,
                                            const std::map<std::string, std::string>& metadata);

}  // namespace shardmesh
