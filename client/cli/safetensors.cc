#include "client/cli/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "local/fd.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kMetadata = "__metadata__";
constexpr size_t kHeaderAlignment = 8;

absl::Status Failed(absl::string_view verb, const std::string& path) {
  return absl::UnavailableError(absl::StrCat("cannot ", verb, " ", path, ": ", std::strerror(errno)));
}

absl::Status CannotCreate(const std::string& path, int error) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(absl::StrCat("cannot create ", path, ": there is no folder ", folder));
    case ENOTDIR:
      return absl::InvalidArgumentError(absl::StrCat("cannot create ", path, ": ", folder, " is no folder"));
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(
          absl::StrCat("cannot create ", path, " in folder ", folder, ": ", std::strerror(error)));
    default:
      return absl::UnavailableError(absl::StrCat("cannot create ", path, ": ", std::strerror(error)));
  }
}

// What is written before it is renamed to `path`.
std::string PartOf(const std::string& path) { return absl::StrCat(path, ".", getpid(), ".part"); }

absl::StatusOr<UniqueFd> Create(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat("cannot create ", path, ": it is a folder; name a file"));
  }
  UniqueFd file(open(PartOf(path).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file.valid()) return CannotCreate(path, errno);
  return file;
}

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failed("write", path);
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, const std::string& head, const std::vector<NamedTensor>& tensors) {
  ASSIGN_OR_RETURN(const UniqueFd file, Create(path));
  RETURN_IF_ERROR(WriteAll(file.get(), head, path));
  for (const NamedTensor& tensor : tensors) RETURN_IF_ERROR(WriteAll(file.get(), tensor.bytes, path));
  return fsync(file.get()) == 0 ? absl::OkStatus() : Failed("sync", path);
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
    header[tensor.name] = {{"dtype", tensor.format == Format::kFp32 ? "F32" : "BF16"},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i)));
  return absl::StrCat(length, text);
}

absl::Status CheckCanWrite(const std::string& path) {
  RETURN_IF_ERROR(Create(path));
  unlink(PartOf(path).c_str());
  return absl::OkStatus();
}

absl::StatusOr<int64_t> WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  ASSIGN_OR_RETURN(const std::string head, SafetensorsHead(tensors, metadata));
  const std::string part = PartOf(path);
  absl::Status status = WriteFile(path, head, tensors);
  if (status.ok() && rename(part.c_str(), path.c_str()) != 0) status = Failed("rename to", path);
  if (!status.ok()) {
    unlink(part.c_str());
    return status;
  }
  int64_t total = static_cast<int64_t>(head.size());
  for (const NamedTensor& tensor : tensors) total += static_cast<int64_t>(tensor.bytes.size());
  return total;
}

}  // namespace shardmesh
