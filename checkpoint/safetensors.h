// The head of the safetensors file format (github.com/huggingface/safetensors): 8 bytes of little-endian header length,
// a JSON header padded with spaces to a multiple of 8; behind it the tensors' bytes lie without gaps, in the order
// given. What is read may come from anybody. Pure and thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

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

inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;  // as the format's own library has it

// Of one element; 0: a dtype that this build does not know.
int64_t SafetensorsDtypeBytes(absl::string_view dtype);

// An entry of that name, dtype and shape, with its bytes. InvalidArgument: a name that is empty, a dtype that this build
// does not know, or a shape with a negative size or of more bytes than there are numbers.
absl::StatusOr<SafetensorsEntry> MakeSafetensorsEntry(std::string name, std::string dtype, std::vector<int64_t> shape);

// The length of the header, from the file's first 8 bytes. DataLoss: longer than such a file can have.
absl::StatusOr<int64_t> SafetensorsHeaderBytes(absl::string_view first_bytes, int64_t file_bytes);

struct SafetensorsContent {
  struct Tensor : SafetensorsEntry {
    int64_t offset = 0;  // behind the header
  };
  std::vector<Tensor> tensors;  // as they lie
  std::map<std::string, std::string> metadata;
};
// The header, of a file with so many bytes behind it. DataLoss: it is none of such a file; tensors overlap, leave gaps,
// or have another size than their shape. InvalidArgument: a dtype that this build does not know, named.
absl::StatusOr<SafetensorsContent> ParseSafetensorsHeader(absl::string_view header, int64_t data_bytes);

}  // namespace shardmesh
