#include "checkpoint/strict_json.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {

using Json = nlohmann::json;

bool IsShallowJson(absl::string_view text, int max_depth) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted) {
      if (text[i] == '\\') ++i;
      quoted = i < text.size() && text[i] != '"';
    } else if (text[i] == '"') {
      quoted = true;
    } else if (text[i] == '[' || text[i] == '{') {
      if (++depth > max_depth) return false;
    } else if (text[i] == ']' || text[i] == '}') {
      --depth;
    }
  }
  return true;
}

absl::StatusOr<Json> ParseStrictJson(absl::string_view text) {
  if (!IsShallowJson(text)) return absl::DataLossError("it has too many brackets in each other");
  std::vector<std::set<std::string>> keys;  // of the open objects
  std::string twice;
  const auto look = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && twice.empty()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key.empty() ? "(empty)" : key;
    }
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), look, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object())
    return absl::DataLossError("it is no JSON object; it was cut, or is none");
  if (!twice.empty()) {
    return absl::DataLossError(absl::StrCat("it has the key \"", absl::CEscape(twice.substr(0, 200)), "\" twice"));
  }
  return json;
}

}  // namespace shardmesh
