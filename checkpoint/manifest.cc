#include "checkpoint/manifest.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "checkpoint/strict_json.h"
#include "core/base/digest.h"
#include "core/base/status.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "shardmesh checkpoint";
constexpr int kVersion = 1;
constexpr absl::string_view kDigestKey = ",\n \"digest\": \"";
constexpr size_t kDigestDigits = 16;

std::string ChecksumOf(const Json& manifest) {
  Hasher hasher;
  hasher.Add(manifest.dump());
  return hasher.Hex();
}

absl::Status Wrong(absl::string_view what) { return absl::DataLossError(absl::StrCat("a manifest ", what)); }

absl::StatusOr<Json> ParseText(absl::string_view text) {
  if (static_cast<int64_t>(text.size()) > kMaxManifestBytes) {
    return Wrong(absl::StrCat("of ", text.size(), " bytes; at most ", kMaxManifestBytes));
  }
  if (!IsShallowJson(text)) return Wrong("with too many brackets in each other");
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) return Wrong("that is no JSON object; it was cut, or is none");
  return json;
}

absl::Status CheckHead(const Json& json) {
  const auto format = json.find("format"), version = json.find("version");
  if (format == json.end() || *format != kFormat) {
    return absl::InvalidArgumentError(absl::StrCat("this is no manifest: its format is not \"", kFormat, "\""));
  }
  if (version == json.end() || *version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("the manifest has version ",
                                                   version == json.end() ? "none" : version->dump().substr(0, 40),
                                                   "; this build of shardmesh reads version ", kVersion));
  }
  return absl::OkStatus();
}

// As a manifest is written.
std::string TextOf(const Json& json) { return json.dump(1) + "\n"; }

// Also that it is written as ManifestText writes it: so each key is there once, and a checksum says all.
absl::Status CheckChecksum(Json json, absl::string_view text) {
  const auto found = json.find("checksum");
  if (found == json.end() || !found->is_string()) return Wrong("without a checksum");
  const auto checksum = found->get<std::string>();
  const bool as_written = TextOf(json) == text;
  json.erase("checksum");
  if (checksum == ChecksumOf(json)) {
    return as_written ? absl::OkStatus() : Wrong("that was edited: it has a key twice, or is set out in another way");
  }
  return Wrong("that was edited, or damaged: its checksum is another");
}

absl::StatusOr<JobSpec> SpecOf(const Json& json) {
  const auto job = json.find("job");
  if (job == json.end() || !job->is_object()) return Wrong("without a job");
  absl::StatusOr<JobSpec> spec = ParseJobSpec(job->dump());
  RETURN_IF_ERROR(Annotate(spec.status(), "the manifest's job"));
  return spec;
}

absl::StatusOr<std::vector<Manifest::File>> FilesOf(const Json& json) {
  const auto list = json.find("files");
  if (list == json.end() || !list->is_array() || list->size() > kMaxManifestFiles)
    return Wrong("without a list of files");
  std::vector<Manifest::File> files;
  std::set<std::string> names;
  for (const Json& entry : *list) {
    const bool has = entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
                     entry.contains("bytes") && entry["bytes"].is_number_integer();
    if (!has) return Wrong("with a file that has no name, or no bytes");
    Manifest::File file{entry["name"].get<std::string>(), entry["bytes"].get<int64_t>()};
    if (!IsPlainFileName(file.name) || file.bytes < 0 || !names.insert(file.name).second) {
      return Wrong(absl::StrCat("with a file \"", absl::CEscape(file.name.substr(0, 200)), "\" of ", file.bytes,
                                " bytes, which it cannot have, or has twice"));
    }
    files.push_back(std::move(file));
  }
  return files;
}

absl::StatusOr<Manifest::Buffer> BufferOf(const Json& json) {
  const auto text = [&](const char* key) {
    return json.is_object() && json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : "";
  };
  std::vector<int64_t> shape;
  bool good = json.is_object() && json.contains("shape") && json["shape"].is_array() && text("digest").size() == 32;
  for (size_t i = 0; good && i < json["shape"].size(); ++i) {
    good = json["shape"][i].is_number_integer();
    if (good) shape.push_back(json["shape"][i].get<int64_t>());
  }
  absl::StatusOr<SafetensorsEntry> entry = MakeSafetensorsEntry(text("name"), text("dtype"), std::move(shape));
  if (!good || !entry.ok()) {
    return Wrong(absl::StrCat("with a buffer that has no name, dtype, shape or digest", entry.ok() ? "" : ": ",
                              entry.ok() ? "" : entry.status().message()));
  }
  return Manifest::Buffer{*std::move(entry), text("digest")};
}

absl::StatusOr<std::vector<Manifest::Buffer>> BuffersOf(const Json& json) {
  const auto list = json.find("buffers");
  std::vector<Manifest::Buffer> buffers;
  if (list == json.end()) return buffers;
  if (!list->is_array() || list->size() > static_cast<size_t>(kMaxBuffers)) return Wrong("without a list of buffers");
  for (const Json& each : *list) {
    ASSIGN_OR_RETURN(Manifest::Buffer buffer, BufferOf(each));
    buffers.push_back(std::move(buffer));
  }
  return buffers;
}

}  // namespace

bool Manifest::Buffer::operator==(const Buffer& other) const {
  return entry.name == other.entry.name && entry.dtype == other.entry.dtype && entry.shape == other.entry.shape &&
         digest == other.digest;
}

std::vector<SafetensorsEntry> Manifest::buffer_entries() const {
  std::vector<SafetensorsEntry> entries;
  for (const Buffer& buffer : buffers) entries.push_back(buffer.entry);
  return entries;
}

std::optional<ManifestHead> ParseManifestHead(absl::string_view head) {
  const auto number = [&](absl::string_view key, int64_t& value) {
    const size_t digits =
        absl::ConsumePrefix(&head, key) ? std::min(head.find_first_not_of("0123456789"), head.size()) : 0;
    if (!absl::SimpleAtoi(head.substr(0, digits), &value)) return false;
    head.remove_prefix(digits);
    return true;
  };
  ManifestHead found;
  int64_t version = 0;
  if (!number(absl::StrCat("{\n \"format\": \"", kFormat, "\",\n \"version\": "), version) || version != kVersion ||
      !number(",\n \"step\": ", found.step)) {
    return std::nullopt;
  }
  if (!absl::StartsWith(head, kDigestKey) && !number(",\n \"saved\": ", found.saved)) return std::nullopt;
  if (!absl::ConsumePrefix(&head, kDigestKey) || head.size() <= kDigestDigits || head[kDigestDigits] != '"' ||
      !absl::SimpleHexAtoi(head.substr(0, kDigestDigits), &found.digest)) {
    return std::nullopt;
  }
  return found;
}

std::optional<int64_t> SavedAt(absl::string_view head) {
  const std::optional<ManifestHead> found = ParseManifestHead(head);
  return found.has_value() ? std::make_optional(found->saved) : std::nullopt;
}

bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name.size() <= 200 && name[0] != '.' && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

absl::StatusOr<JobSpec> ParseJobSpec(const std::string& json) {
  v1::JobSpec proto;
  const auto parsed = google::protobuf::util::JsonStringToMessage(json, &proto);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("it is not one that this build knows: ", std::string(parsed.message())));
  }
  ASSIGN_OR_RETURN(JobSpec spec, JobSpecFromProto(proto));
  RETURN_IF_ERROR(spec.Validate());
  return spec;
}

std::string ManifestText(const Manifest& manifest) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string job;
  (void)google::protobuf::util::MessageToJsonString(ToProto(manifest.spec), &job, options);  // no Any, nothing fails
  Json json = {{"format", kFormat}, {"version", kVersion}, {"step", manifest.step}};
  if (manifest.saved > 0) json["saved"] = manifest.saved;
  json["digest"] = absl::StrFormat("%016x", manifest.digest);
  json["job"] = Json::parse(job, nullptr, false);
  json["files"] = Json::array();
  for (const Manifest::File& file : manifest.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  for (const Manifest::Buffer& buffer : manifest.buffers) {
    json["buffers"].push_back({{"name", buffer.entry.name},
                               {"dtype", buffer.entry.dtype},
                               {"shape", buffer.entry.shape},
                               {"digest", buffer.digest}});
  }
  json["checksum"] = ChecksumOf(json);
  return TextOf(json);
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text) {
  ASSIGN_OR_RETURN(const Json json, ParseText(text));
  RETURN_IF_ERROR(CheckHead(json));
  RETURN_IF_ERROR(CheckChecksum(json, text));
  Manifest manifest;
  const auto step = json.find("step"), saved = json.find("saved"), digest = json.find("digest");
  if (step == json.end() || !step->is_number_integer() || step->get<int64_t>() < 0 || step->get<int64_t>() > kMaxStep) {
    return Wrong("without a step");
  }
  manifest.step = step->get<int64_t>();
  if (saved != json.end()) {
    if (!saved->is_number_integer() || saved->get<int64_t>() < 1 || saved->get<int64_t>() > kMaxStep) {
      return Wrong("whose \"saved\" is no count");
    }
    manifest.saved = saved->get<int64_t>();
  }
  if (digest == json.end() || !digest->is_string() || digest->get<std::string>().size() != 16 ||
      !absl::SimpleHexAtoi(digest->get<std::string>(), &manifest.digest)) {
    return Wrong("without a digest of 16 hexadecimal digits");
  }
  ASSIGN_OR_RETURN(manifest.spec, SpecOf(json));
  ASSIGN_OR_RETURN(manifest.files, FilesOf(json));
  ASSIGN_OR_RETURN(manifest.buffers, BuffersOf(json));
  return manifest;
}

}  // namespace shardmesh
