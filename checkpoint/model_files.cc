#include "checkpoint/model_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/file_changes.h"
#include "checkpoint/manifest.h"
#include "checkpoint/stored_files.h"
#include "checkpoint/strict_json.h"
#include "core/base/status.h"
#include "core/format/half.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kOneFile[] = "model.safetensors";

struct OpenFile {
  std::shared_ptr<const UniqueFd> fd;
  int64_t bytes = 0;
};

absl::StatusOr<OpenFile> OpenRegular(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (!fd.valid() || fstat(fd.get(), &info) != 0) return FailedTo("open", path, errno);
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(path + " is no regular file");
  return OpenFile{std::make_shared<const UniqueFd>(std::move(fd)), info.st_size};
}

absl::Status ReadAt(int fd, int64_t offset, char* to, int64_t bytes, const std::string& path) {
  while (bytes > 0) {
    const ssize_t got = pread(fd, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FailedTo("read", path, errno);
    if (got == 0)
      return absl::DataLossError(absl::StrCat(path, " ends at ", offset, "; it was longer when it was opened"));
    to += got;
    offset += got;
    bytes -= got;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  ASSIGN_OR_RETURN(const OpenFile file, OpenRegular(path));
  if (file.bytes > kMaxSafetensorsHeader) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", file.bytes, " bytes; an index has at most ", kMaxSafetensorsHeader));
  }
  std::string text(static_cast<size_t>(file.bytes), '\0');
  RETURN_IF_ERROR(ReadAt(file.fd->get(), 0, text.data(), file.bytes, path));
  return text;
}

template <class Number>
void Widen(const std::string& bytes, float (*to_float)(Number), std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    Number number;
    std::memcpy(&number, bytes.data() + i * sizeof(number), sizeof(number));
    values[i] = to_float(number);
  }
}

template <class Number>
std::string Narrow(const std::vector<float>& values, Number (*from_float)(float)) {
  std::string bytes(values.size() * sizeof(Number), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const Number number = from_float(values[i]);
    std::memcpy(bytes.data() + i * sizeof(number), &number, sizeof(number));
  }
  return bytes;
}

}  // namespace

bool IsFloatDtype(absl::string_view dtype) { return dtype == "F32" || dtype == "BF16" || dtype == "F16"; }

std::string FloatsAs(absl::string_view dtype, const std::vector<float>& values) {
  if (dtype == "BF16") return Narrow<uint16_t>(values, FloatToBf16Rne);
  if (dtype == "F16") return Narrow<uint16_t>(values, FloatToHalf);
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

absl::StatusOr<ModelFiles> ModelFiles::Open(const std::string& given) {
  const fs::path path = fs::absolute(given).lexically_normal();
  ModelFiles model;
  std::error_code ignored;
  std::string name = path.filename().string();
  model.folder_ = path.parent_path().string();
  if (fs::is_directory(path, ignored)) {
    model.folder_ = path.string();
    name = fs::exists(path / kIndexFile, ignored) ? kIndexFile : kOneFile;
    if (!fs::exists(path / name, ignored)) {
      return absl::NotFoundError(absl::StrCat(path.string(), " has neither ", kOneFile, " nor ", kIndexFile,
                                              "; pickle-based files (pytorch_model.bin, .pt) are not read"));
    }
  }
  if (absl::EndsWith(name, ".json")) {
    RETURN_IF_ERROR(Annotate(model.AddIndexed(name), model.folder_ + "/" + name));
  } else {
    RETURN_IF_ERROR(model.AddFile(name).status());
  }
  RETURN_IF_ERROR(Annotate(model.IndexNames(), given));
  return model;
}

absl::StatusOr<std::vector<std::string>> ModelFiles::AddFile(const std::string& name) {
  const std::string path = folder_ + "/" + name;
  ASSIGN_OR_RETURN(const OpenFile file, OpenRegular(path));
  std::string first(static_cast<size_t>(std::min<int64_t>(file.bytes, 8)), '\0');
  RETURN_IF_ERROR(ReadAt(file.fd->get(), 0, first.data(), static_cast<int64_t>(first.size()), path));
  const absl::StatusOr<int64_t> header_bytes = SafetensorsHeaderBytes(first, file.bytes);
  RETURN_IF_ERROR(Annotate(header_bytes.status(), path));
  std::string header(static_cast<size_t>(*header_bytes), '\0');
  RETURN_IF_ERROR(ReadAt(file.fd->get(), 8, header.data(), *header_bytes, path));
  const int64_t begin = 8 + *header_bytes;
  absl::StatusOr<SafetensorsContent> content = ParseSafetensorsHeader(header, file.bytes - begin);
  RETURN_IF_ERROR(Annotate(content.status(), path));
  std::vector<std::string> names;
  for (SafetensorsContent::Tensor& tensor : content->tensors) {
    names.push_back(tensor.name);
    const int64_t offset = begin + tensor.offset;
    tensors_.push_back({std::move(static_cast<SafetensorsEntry&>(tensor)), static_cast<int>(files_.size()), offset});
  }
  paths_.push_back(path);
  files_.push_back(file.fd);
  return names;
}

absl::Status ModelFiles::AddIndexed(const std::string& index) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(folder_ + "/" + index));
  ASSIGN_OR_RETURN(const Json json, ParseStrictJson(text));
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object()) return absl::DataLossError("it has no weight_map");
  std::map<std::string, std::set<std::string>> by_file;
  for (const auto& [name, file] : map->items()) {
    const std::string file_name = file.is_string() ? file.get<std::string>() : "";
    if (!IsPlainFileName(file_name)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", absl::CEscape(name.substr(0, 200)),
                                                     "\" is said to be in \"", absl::CEscape(file_name.substr(0, 200)),
                                                     "\"; the name of a file beside the index is needed"));
    }
    by_file[file_name].insert(name);
  }
  for (const auto& [file, expected] : by_file) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, AddFile(file));
    const std::set<std::string> there(names.begin(), names.end());
    for (const std::string& name : expected) {
      if (there.count(name) == 0)
        return absl::DataLossError(absl::StrCat(file, " has no tensor \"", absl::CEscape(name), "\""));
    }
    for (const std::string& name : there) {
      if (expected.count(name) > 0) continue;
      return absl::DataLossError(absl::StrCat(file, " has a tensor \"", absl::CEscape(name),
                                              "\" that is said to be elsewhere, or not at all"));
    }
  }
  return absl::OkStatus();
}

absl::Status ModelFiles::IndexNames() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (by_name_.emplace(tensors_[i].name, static_cast<int>(i)).second) continue;
    return absl::DataLossError(absl::StrCat("tensor \"", absl::CEscape(tensors_[i].name), "\" is there twice"));
  }
  return absl::OkStatus();
}

int64_t ModelFiles::num_bytes() const {
  int64_t bytes = 0;
  for (const ModelTensor& tensor : tensors_) bytes += tensor.bytes;
  return bytes;
}

const ModelTensor* ModelFiles::Find(absl::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

absl::StatusOr<std::string> ModelFiles::Read(const ModelTensor& tensor) const {
  std::string bytes(static_cast<size_t>(tensor.bytes), '\0');
  RETURN_IF_ERROR(ReadAt(files_[tensor.file]->get(), tensor.offset, bytes.data(), tensor.bytes, paths_[tensor.file]));
  return bytes;
}

absl::StatusOr<std::vector<float>> ModelFiles::ReadFloats(const ModelTensor& tensor) const {
  if (!IsFloatDtype(tensor.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", tensor.name, "\" is ", tensor.dtype, "; F32, BF16 or F16 is needed"));
  }
  ASSIGN_OR_RETURN(const std::string bytes, Read(tensor));
  std::vector<float> values(bytes.size() / static_cast<size_t>(SafetensorsDtypeBytes(tensor.dtype)));
  if (tensor.dtype == "BF16") {
    Widen<uint16_t>(bytes, Bf16ToFloat, values);
  } else if (tensor.dtype == "F16") {
    Widen<uint16_t>(bytes, HalfToFloat, values);
  } else if (!bytes.empty()) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return values;
}

}  // namespace shardmesh
