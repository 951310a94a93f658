#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/stored_files.h"
#include "core/base/digest.h"
#include "tests/fuzz/targets.h"

namespace shardmesh::fuzz {
namespace {

using Json = nlohmann::ordered_json;

void Check(bool promise, const char* what) {
  if (promise) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void CheckFiles(const Manifest& manifest) {
  const absl::StatusOr<StoredFiles> stored =
      StoredFiles::Create(manifest.spec, manifest.buffer_entries(), /*max_file_bytes=*/10'000);
  if (!stored.ok()) return Check(!stored.status().message().empty(), "an error says what was wrong");
  std::vector<int64_t> ends;
  for (const StoredFile& file : stored->files()) {
    Check(IsPlainFileName(file.name), "a file has a name that it can have");
    ends.push_back(static_cast<int64_t>(file.head.size()));
  }
  for (const FilePart& part : stored->parts()) {
    Check(part.offset == ends[part.file] && part.bytes >= 0, "parts follow each other");
    ends[part.file] += part.bytes;
  }
  for (size_t i = 0; i < ends.size(); ++i) Check(ends[i] == stored->files()[i].bytes, "and fill their file");
}

void CheckText(absl::string_view text) {
  const absl::StatusOr<Manifest> manifest = ParseManifest(text);
  if (!manifest.ok()) return Check(!manifest.status().message().empty(), "an error says what was wrong");
  Check(manifest->spec.Validate().ok(), "a manifest's job is valid");
  Check(manifest->step >= 0 && manifest->step <= kMaxStep, "a manifest's step is one");
  const absl::StatusOr<Manifest> again = ParseManifest(ManifestText(*manifest));
  Check(again.ok(), "a manifest's text is one");
  Check(Difference(manifest->spec, again->spec).empty(), "and gives the job back");
  Check(manifest->step == again->step && manifest->digest == again->digest, "and step and digest");
  Check(manifest->files.size() == again->files.size(), "and all files");
  for (size_t i = 0; i < manifest->files.size(); ++i) {
    const Manifest::File& file = manifest->files[i];
    Check(IsPlainFileName(file.name) && file.bytes >= 0, "a manifest's files have names and sizes");
    Check(file.name == again->files[i].name && file.bytes == again->files[i].bytes, "and each of them");
  }
  Check(manifest->buffers == again->buffers, "and all buffers");
  CheckFiles(*manifest);
}

// As if it had been written like this; empty: it is no JSON object.
std::string Sealed(absl::string_view text) {
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return "";
  json.erase("checksum");
  Hasher hasher;
  hasher.Add(json.dump());
  json["checksum"] = hasher.Hex();
  return json.dump(1) + "\n";
}

}  // namespace

void Manifests(absl::string_view input) {
  CheckText(input);
  CheckText(Sealed(input));
}

}  // namespace shardmesh::fuzz
