#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "checkpoint/safetensors.h"
#include "tests/fuzz/targets.h"

namespace shardmesh::fuzz {
namespace {

using Json = nlohmann::ordered_json;

void Check(bool promise, const char* what) {
  if (promise) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

std::vector<SafetensorsEntry> EntriesIn(absl::string_view input) {
  std::vector<SafetensorsEntry> entries;
  for (const absl::string_view line : absl::StrSplit(input, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> fields = absl::StrSplit(line, '\t');
    SafetensorsEntry entry;
    entry.name = fields[0];
    if (fields.size() > 1) entry.dtype = fields[1];
    int32_t bytes = 0;
    if (fields.size() > 2 && absl::SimpleAtoi(fields[2], &bytes) && bytes > 0) entry.bytes = bytes;
    entry.shape = {entry.bytes};
    entries.push_back(std::move(entry));
  }
  return entries;
}

// Of the outer object.
bool EveryKeyOnce(absl::string_view text) {
  std::set<std::string> keys;
  bool once = true;
  const Json parsed_text =
      Json::parse(text.begin(), text.end(), [&](int depth, Json::parse_event_t event, Json& parsed) {
        if (event == Json::parse_event_t::key && depth == 1)
          once = once && keys.insert(parsed.get<std::string>()).second;
        return true;
      });
  return once && !parsed_text.is_discarded();
}

// As the header of a file with so many bytes behind it.
void ReadHeader(absl::string_view input, int64_t data_bytes) {
  const absl::StatusOr<SafetensorsContent> content = ParseSafetensorsHeader(input, data_bytes);
  if (!content.ok()) return Check(!content.status().message().empty(), "an error says what was wrong");
  int64_t end = 0;
  std::set<std::string> names;
  for (const SafetensorsContent::Tensor& tensor : content->tensors) {
    Check(tensor.offset == end && tensor.bytes >= 0, "tensors lie one behind the other");
    Check(names.insert(tensor.name).second, "each name once");
    int64_t bytes = SafetensorsDtypeBytes(tensor.dtype);
    for (const int64_t extent : tensor.shape) bytes = extent == 0 || bytes == 0 ? 0 : bytes * extent;
    Check(bytes == tensor.bytes, "a tensor has the bytes of its shape");
    end += tensor.bytes;
  }
  Check(end == data_bytes, "and fill the file");
}

}  // namespace

void SafetensorsHeads(absl::string_view input) {
  for (const int64_t data_bytes : {0, 8, 64}) ReadHeader(input, data_bytes);
  (void)SafetensorsHeaderBytes(input, static_cast<int64_t>(input.size()));
  const std::vector<SafetensorsEntry> entries = EntriesIn(input);
  const absl::StatusOr<std::string> head = SafetensorsHead(entries, {{"format", "pt"}});
  if (!head.ok()) return Check(!head.status().message().empty(), "an error says what was wrong");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>((*head)[i]);
  Check(length == head->size() - 8 && length % 8 == 0, "the length is that of the header, which is padded");
  const absl::string_view text = absl::string_view(*head).substr(8);
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  Check(json.is_object() && text[0] == '{' && EveryKeyOnce(text), "the header is an object with each key once");
  Check(json.size() == entries.size() + 1, "of every tensor, and the metadata");
  int64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    const auto& found = json.at(entry.name);
    Check(found.at("dtype") == entry.dtype && found.at("shape") == entry.shape, "it says what a tensor is");
    Check(found.at("data_offsets") == Json({offset, offset + entry.bytes}), "and where, without gaps");
    offset += entry.bytes;
  }
}

}  // namespace shardmesh::fuzz
