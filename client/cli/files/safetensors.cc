#include "client/cli/files/safetensors.h"

#include "checkpoint/safetensors.h"
#include "client/cli/files/whole_file.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

std::string DtypeOf(const NamedTensor& tensor) {
  if (!tensor.dtype.empty()) return std::string(tensor.dtype);
  return tensor.format == Format::kFp32 ? "F32" : "BF16";
}

}  // namespace

absl::StatusOr<int64_t> WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const NamedTensor& tensor : tensors) {
    entries.push_back({tensor.name, DtypeOf(tensor), tensor.shape, static_cast<int64_t>(tensor.bytes.size())});
  }
  ASSIGN_OR_RETURN(const std::string head, SafetensorsHead(entries, metadata));
  std::vector<absl::string_view> parts = {head};
  for (const NamedTensor& tensor : tensors) parts.push_back(tensor.bytes);
  return WriteWholeFile(path, parts);
}

}  // namespace shardmesh
