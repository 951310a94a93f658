#include "client/cli/safetensors.h"

#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "client/cli/whole_file.h"
#include "core/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kMetadata = "__metadata__";
constexpr size_t kHeaderAlignment = 8;

std::string DtypeOf(const NamedTensor& tensor) {
  if (!tensor.dtype.empty()) return std::string(tensor.dtype);
  return tensor.format == Format::kFp32 ? "F32" : "BF16";
}

}  // namespace

absl::StatusOr<std::string> SafetensorsHead(const std::vector<NamedTensor>& tensors,
                                            const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  header[std::string(kMetadata)] = metadata;
  std::set<absl::string_view> names = {kMetadata};
  uint64_t offset = 0;
  for (const NamedTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("a safetensors file cannot hold a tensor named \"", tensor.name,
                                                     "\" ",
                                                     tensor.name == kMetadata ? "(the name is reserved)" : "twice"));
    }
    header[tensor.name] = {
        {"dtype", DtypeOf(tensor)}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i)));
  return absl::StrCat(length, text);
}

absl::StatusOr<int64_t> WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  ASSIGN_OR_RETURN(const std::string head, SafetensorsHead(tensors, metadata));
  std::vector<absl::string_view> parts = {head};
  for (const NamedTensor& tensor : tensors) parts.push_back(tensor.bytes);
  return WriteWholeFile(path, parts);
}

}  // namespace shardmesh
