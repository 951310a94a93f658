#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/strict_json.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::json;

constexpr std::pair<absl::string_view, int64_t> kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},     {"C64", 8},
};
// How files begin that are given in place of safetensors.
constexpr std::pair<absl::string_view, absl::string_view> kOtherFormats[] = {
    {"PK\x03\x04", "a zip archive, as torch.save and numpy.savez write it"},
    {"\x80\x02", "a pickle, as torch.save once wrote it"},
    {"\x80\x03", "a pickle"},
    {"\x80\x04", "a pickle"},
    {"\x80\x05", "a pickle"},
    {"\x93NUMPY", "an array of numpy"},
    {"GGUF", "a GGUF file"},
    {"\x89HDF", "an HDF5 file"},
};
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

absl::Status Wrong(absl::string_view name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("tensor \"", absl::CEscape(name.substr(0, 200)), "\" ", what));
}

// Of a number in a JSON array that may be anything; -1: it is none, or too large.
int64_t NumberAt(const Json& list, size_t i) {
  if (!list[i].is_number_unsigned()) return -1;
  const uint64_t number = list[i].get<uint64_t>();
  return number > static_cast<uint64_t>(kMost) ? -1 : static_cast<int64_t>(number);
}

// Its size in bytes. DataLoss: no shape, or one of more bytes than there are numbers.
absl::StatusOr<int64_t> ReadShape(const std::string& name, const Json& json, int64_t width,
                                  std::vector<int64_t>& shape) {
  const auto found = json.find("shape");
  if (found == json.end() || !found->is_array()) return Wrong(name, "has no shape");
  int64_t bytes = width;
  bool empty = false;
  for (size_t i = 0; i < found->size(); ++i) {
    const int64_t extent = NumberAt(*found, i);
    if (extent < 0) return Wrong(name, "has a shape of something else than sizes");
    shape.push_back(extent);
    empty = empty || extent == 0;
    if (extent > 0 && bytes > kMost / extent) return Wrong(name, "has a shape that is too large for any file");
    if (extent > 0) bytes *= extent;
  }
  return empty ? 0 : bytes;
}

absl::StatusOr<SafetensorsContent::Tensor> ReadTensor(const std::string& name, const Json& json, int64_t data_bytes) {
  if (!json.is_object()) return Wrong(name, "is described by something else than an object");
  const auto dtype = json.find("dtype"), offsets = json.find("data_offsets");
  if (dtype == json.end() || !dtype->is_string()) return Wrong(name, "has no dtype");
  if (offsets == json.end() || !offsets->is_array() || offsets->size() != 2) return Wrong(name, "has no data_offsets");
  SafetensorsContent::Tensor tensor;
  tensor.name = name;
  tensor.dtype = dtype->get<std::string>();
  const int64_t width = SafetensorsDtypeBytes(tensor.dtype);
  if (width == 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", absl::CEscape(name.substr(0, 200)),
                                                   "\" has the dtype \"", absl::CEscape(tensor.dtype.substr(0, 40)),
                                                   "\", which this build does not know"));
  }
  ASSIGN_OR_RETURN(tensor.bytes, ReadShape(name, json, width, tensor.shape));
  tensor.offset = NumberAt(*offsets, 0);
  const int64_t end = NumberAt(*offsets, 1);
  if (tensor.offset < 0 || end < tensor.offset || end > data_bytes) {
    return Wrong(name, absl::StrCat("lies at ", offsets->dump().substr(0, 80), "; the file has ", data_bytes,
                                    " bytes of tensors"));
  }
  if (end - tensor.offset != tensor.bytes) {
    return Wrong(name, absl::StrCat("has ", end - tensor.offset, " bytes; its shape and dtype take ", tensor.bytes));
  }
  return tensor;
}

absl::StatusOr<std::map<std::string, std::string>> ReadMetadata(const Json& json) {
  std::map<std::string, std::string> metadata;
  if (!json.is_object()) return absl::DataLossError("its __metadata__ is no object");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) return absl::DataLossError("its __metadata__ has something else than text");
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

// Without gaps, each byte once.
absl::Status CheckCover(const std::vector<SafetensorsContent::Tensor>& tensors, int64_t data_bytes) {
  int64_t end = 0;
  for (const SafetensorsContent::Tensor& tensor : tensors) {
    if (tensor.offset != end) {
      return Wrong(tensor.name, absl::StrCat("begins at ", tensor.offset, ", where the one before it ends at ", end));
    }
    end += tensor.bytes;
  }
  if (end == data_bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("its tensors end at ", end, ", the file at ", data_bytes));
}

}  // namespace

int64_t SafetensorsDtypeBytes(absl::string_view dtype) {
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

absl::StatusOr<SafetensorsEntry> MakeSafetensorsEntry(std::string name, std::string dtype, std::vector<int64_t> shape) {
  const auto refused = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", absl::CEscape(name.substr(0, 200)), "\" ", what));
  };
  if (name.empty()) return refused("has an empty name");
  int64_t bytes = SafetensorsDtypeBytes(dtype);
  if (bytes == 0) {
    return refused(
        absl::StrCat("has the dtype \"", absl::CEscape(dtype.substr(0, 40)), "\", which this build does not know"));
  }
  for (const int64_t size : shape) {
    if (size < 0 || (size > 0 && bytes > kMost / size)) return refused(absl::StrCat("has a dimension of ", size));
    bytes *= size;
  }
  return SafetensorsEntry{std::move(name), std::move(dtype), std::move(shape), bytes};
}

absl::StatusOr<int64_t> SafetensorsHeaderBytes(absl::string_view first_bytes, int64_t file_bytes) {
  if (first_bytes.size() < 8) return absl::DataLossError("it is shorter than the head of a safetensors file");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(first_bytes[i]);
  if (length <= static_cast<uint64_t>(kMaxSafetensorsHeader) && static_cast<int64_t>(length) <= file_bytes - 8) {
    return static_cast<int64_t>(length);
  }
  for (const auto& [magic, what] : kOtherFormats) {
    if (!absl::StartsWith(first_bytes, magic)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("it is ", what,
                     ", and no safetensors file; pickle-based files (.pt, .bin, .ckpt) and .npz are not read, since "
                     "unpickling runs what is in them: convert it with safetensors.torch.save_file"));
  }
  return absl::DataLossError(absl::StrCat("its header would have ", length, " bytes, of a file of ", file_bytes,
                                          "; it was cut, or is no safetensors file"));
}

absl::StatusOr<SafetensorsContent> ParseSafetensorsHeader(absl::string_view header, int64_t data_bytes) {
  const absl::StatusOr<Json> parsed = ParseStrictJson(header);
  RETURN_IF_ERROR(Annotate(parsed.status(), "its header"));
  if (header[0] != '{') return absl::DataLossError("its header does not begin with {, as the format wants it");
  const Json& json = *parsed;
  SafetensorsContent content;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      ASSIGN_OR_RETURN(content.metadata, ReadMetadata(value));
      continue;
    }
    ASSIGN_OR_RETURN(SafetensorsContent::Tensor tensor, ReadTensor(name, value, data_bytes));
    content.tensors.push_back(std::move(tensor));
  }
  std::sort(content.tensors.begin(), content.tensors.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.offset, a.bytes) < std::make_pair(b.offset, b.bytes);
  });
  RETURN_IF_ERROR(CheckCover(content.tensors, data_bytes));
  return content;
}

}  // namespace shardmesh
