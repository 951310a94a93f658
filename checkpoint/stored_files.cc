#include "checkpoint/stored_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

bool HasOwnStorage(const ParameterSpec& parameter) { return parameter.tied_to.empty(); }

// A row is what the last dimension counts; a tensor of fewer dimensions is one.
int64_t RowElements(const ParameterSpec& parameter) {
  const int64_t row = parameter.shape.size() < 2 ? parameter.NumElements() : parameter.shape.back();
  return std::max<int64_t>(row, 1);
}

const char* DtypeOfWeights(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp32:
      return "F32";
    case WeightFormat::kInt8Row:
      return "I8";
    case WeightFormat::kNf4:
      return "U8";
    case WeightFormat::kBf16:
    case WeightFormat::kBf16Sr:
    case WeightFormat::kBf16Plus16:
    case WeightFormat::kBf16Plus8Sr:
      break;
  }
  return "BF16";
}

const char* DtypeOfStates(StateFormat format) {
  switch (format) {
    case StateFormat::kFp32:
      return "F32";
    case StateFormat::kBf16Sr:
      return "BF16";
    case StateFormat::kFp8:
      return "F8_E4M3";
    case StateFormat::kDyn8:
    case StateFormat::kDyn4:
    case StateFormat::kFp8x32:  // of some states UE5M3, which has no name there
      break;
  }
  return "U8";
}

const char* DtypeOfBytes(int64_t bytes) { return bytes == 4 ? "F32" : bytes == 2 ? "U16" : "U8"; }

}  // namespace

void StoredFiles::AddParts(const JobSpec& spec, int tensor) {
  const ParameterSpec& parameter = spec.parameters[tensor];
  const int64_t elements = parameter.NumElements();
  const int states = spec.NumStatesOf(parameter);
  for (int stream = 0; stream <= states; ++stream) {
    const bool weights = stream == 0;
    const StoredLayout layout =
        weights ? LayoutOf(parameter.format, RowElements(parameter)) : LayoutOf(parameter.states);
    std::string name = parameter.name;
    if (!weights) absl::StrAppend(&name, ".", StateName(spec.group(parameter.group), stream - 1));
    FilePart codes{tensor, stream, false, layout.codes, name};
    codes.dtype = weights ? DtypeOfWeights(parameter.format) : DtypeOfStates(parameter.states);
    codes.bytes = layout.codes.BytesOf(elements);
    codes.shape = layout.codes.elements == 1 ? parameter.shape : std::vector<int64_t>{codes.bytes};
    parts_.push_back(std::move(codes));
    if (layout.extra.bytes == 0 || elements == 0) continue;
    const bool remainder = layout.extra.elements == 1;
    FilePart extra{tensor, stream, true, layout.extra, absl::StrCat(name, remainder ? ".remainder" : ".scales")};
    extra.bytes = layout.extra.BytesOf(elements);
    extra.dtype = remainder ? DtypeOfBytes(layout.extra.bytes) : layout.extra.bytes == 2 ? "BF16" : "F32";
    extra.shape = remainder ? parameter.shape : std::vector<int64_t>{extra.bytes / layout.extra.bytes};
    parts_.push_back(std::move(extra));
  }
}

// Parts that are weights, for everybody, or the others, in files of about max_file_bytes.
absl::Status StoredFiles::MakeFiles(const std::string& stem, bool weights, int64_t max_file_bytes) {
  std::vector<std::vector<int>> cut(1);
  std::set<std::string> names;
  int64_t bytes = 0;
  for (int p = 0; p < static_cast<int>(parts_.size()); ++p) {
    FilePart& part = parts_[p];
    const bool of_weights = part.stream == 0 && !(part.extra && part.layout.elements == 1);
    if (of_weights != weights) continue;
    if (!cut.back().empty() && bytes + part.bytes > max_file_bytes) {
      cut.emplace_back();
      bytes = 0;
    }
    bytes += part.bytes;
    cut.back().push_back(p);
    if (!part.extra && !names.insert(part.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two tensors of the model are named ", QuotedName(part.name), "; rename one"));
    }
  }
  if (!weights && cut.back().empty()) return absl::OkStatus();
  for (size_t f = 0; f < cut.size(); ++f) {
    std::vector<SafetensorsEntry> entries;
    for (const int p : cut[f]) {
      while (parts_[p].extra && !names.insert(parts_[p].name).second) parts_[p].name += "_";
      entries.push_back({parts_[p].name, parts_[p].dtype, parts_[p].shape, parts_[p].bytes});
    }
    StoredFile file;
    file.name = cut.size() == 1 ? stem + ".safetensors"
                                : absl::StrFormat("%s-%05d-of-%05d.safetensors", stem, f + 1, cut.size());
    ASSIGN_OR_RETURN(file.head, SafetensorsHead(entries, {{"format", "pt"}}));
    file.bytes = static_cast<int64_t>(file.head.size());
    for (const int p : cut[f]) {
      parts_[p].file = static_cast<int>(files_.size());
      parts_[p].offset = file.bytes;
      file.bytes += parts_[p].bytes;
    }
    files_.push_back(std::move(file));
  }
  return absl::OkStatus();
}

void StoredFiles::MakeIndex() {
  Json map = Json::object();
  auto& members = map.get_ref<Json::object_t&>();  // a list: names are unique, and looking for one passes all
  int64_t bytes = 0;
  int files = 0;
  for (const FilePart& part : parts_) {
    if (files_[part.file].name.rfind(kModelStem, 0) != 0) continue;
    members.emplace_back(part.name, files_[part.file].name);
    bytes += part.bytes;
    files = std::max(files, part.file + 1);
  }
  if (files > 1) index_ = Json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(1) + "\n";
}

absl::StatusOr<StoredFiles> StoredFiles::Create(const JobSpec& spec, const std::vector<SafetensorsEntry>& buffers,
                                                int64_t max_file_bytes) {
  RETURN_IF_ERROR(spec.Validate());
  StoredFiles stored;
  for (int t = 0; t < static_cast<int>(spec.parameters.size()); ++t) {
    if (HasOwnStorage(spec.parameters[t])) stored.AddParts(spec, t);
  }
  for (const SafetensorsEntry& buffer : buffers) {
    FilePart part{kBufferTensor, 0, false, {}, buffer.name, buffer.dtype, buffer.shape, buffer.bytes};
    stored.parts_.push_back(std::move(part));
  }
  RETURN_IF_ERROR(stored.MakeFiles(kModelStem, /*weights=*/true, max_file_bytes));
  RETURN_IF_ERROR(stored.MakeFiles("states", /*weights=*/false, max_file_bytes));
  stored.MakeIndex();
  for (int p = 0; p < static_cast<int>(stored.parts_.size()); ++p) {
    const FilePart& part = stored.parts_[p];
    if (part.tensor == kBufferTensor) continue;
    stored.index_of_[{part.tensor, 2 * part.stream + (part.extra ? 1 : 0)}] = p;
  }
  return stored;
}

const FilePart* StoredFiles::Find(int tensor, int stream, bool extra) const {
  const auto it = index_of_.find({tensor, 2 * stream + (extra ? 1 : 0)});
  return it == index_of_.end() ? nullptr : &parts_[it->second];
}

int64_t StoredFiles::num_bytes() const {
  int64_t bytes = 0;
  for (const StoredFile& file : files_) bytes += file.bytes;
  return bytes;
}

}  // namespace shardmesh
