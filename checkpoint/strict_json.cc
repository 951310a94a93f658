#include "checkpoint/strict_json.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
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

namespace {

// Looks for a key that an object has twice. Json's own parser would keep the last one's value; its callback could tell,
// but that parser then looks through all members of an object at the end of each.
class KeysOnce final : public nlohmann::json_sax<Json> {
 public:
  bool key(string_t& key) override {
    if (!keys_.back().insert(key).second && twice_.empty()) twice_ = key.empty() ? "(empty)" : key;
    return true;
  }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return true;
  }
  bool end_object() override {
    keys_.pop_back();
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

  const std::string& twice() const { return twice_; }

 private:
  std::vector<std::set<std::string>> keys_;  // of the open objects
  std::string twice_;
};

}  // namespace

absl::StatusOr<Json> ParseStrictJson(absl::string_view text) {
  if (absl::StartsWith(text, "\xEF\xBB\xBF")) {  // the parser would pass over it, other readers do not
    return absl::DataLossError("it begins with a byte order mark; write it as UTF-8 without one");
  }
  if (!IsShallowJson(text)) return absl::DataLossError("it has too many brackets in each other");
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object())
    return absl::DataLossError("it is no JSON object; it was cut, or is none");
  KeysOnce keys;
  Json::sax_parse(text.begin(), text.end(), &keys);
  if (keys.twice().empty()) return json;
  return absl::DataLossError(absl::StrCat("it has the key \"", absl::CEscape(keys.twice().substr(0, 200)), "\" twice"));
}

}  // namespace shardmesh
