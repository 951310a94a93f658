// Writing the safetensors file format (github.com/huggingface/safetensors): 8 bytes of little-endian header length, a
// JSON header padded with spaces to a multiple of 8, then the tensors' bytes without gaps, in the order given.
// Pure but for the file; thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/format.h"

namespace shardmesh {

struct NamedTensor {
  std::string name;
  Format format = Format::kFp32;  // bf16_sr is written as BF16: the rounding is no property of the bytes
  std::vector<int64_t> shape;
  absl::string_view bytes;  // borrowed; row-major, little-endian
  absl::string_view dtype;  // of the file format, in place of what `format` says; empty: that one
};

// Length and header. InvalidArgument: a name twice, or the reserved name "__metadata__".
absl::StatusOr<std::string> SafetensorsHead(const std::vector<NamedTensor>& tensors,
                                            const std::map<std::string, std::string>& metadata);

// Whether WriteSafetensors could make this file now; leaves nothing behind. To be asked before long work.
//   NotFound: its folder is not there.
//   InvalidArgument: it is there and, through symbolic links, no regular file (the message says what), or it lies in
//     something that is no folder.
//   AlreadyExists: what is written beside it first (FILE.PID.part) is there.
//   PermissionDenied: no file may be made in its folder.
//   Unavailable: anything else (with errno).
absl::Status CheckCanWrite(const std::string& path);

// Writes a file that appears whole or not at all: beside it, synced, then renamed over an old one. A symbolic link
// stays, and the file it names is written. Returns its bytes.
// Errors as SafetensorsHead and CheckCanWrite; nothing is left of it then.
absl::StatusOr<int64_t> WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata);

}  // namespace shardmesh
