#include "checkpoint/safetensors.h"

#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kMetadata = "__metadata__";
constexpr size_t kHeaderAlignment = 8;

}  // namespace

absl::StatusOr<std::string> SafetensorsHead(const std::vector<SafetensorsEntry>& entries,
                                            const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  auto& members = header.get_ref<Json::object_t&>();  // a list: names are unique, and looking for one passes all
  members.emplace_back(std::string(kMetadata), metadata);
  std::set<absl::string_view> names = {kMetadata};
  int64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (!names.insert(entry.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("a safetensors file cannot hold a tensor named \"", entry.name,
                                                     "\" ",
                                                     entry.name == kMetadata ? "(the name is reserved)" : "twice"));
    }
    members.emplace_back(entry.name, Json{{"dtype", entry.dtype},
                                          {"shape", entry.shape},
                                          {"data_offsets", {offset, offset + entry.bytes}}});
    offset += entry.bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("a safetensors file cannot hold these names or metadata; they are not UTF-8: ", error.what()));
  }
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i)));
  return absl::StrCat(length, text);
}

}  // namespace shardmesh
