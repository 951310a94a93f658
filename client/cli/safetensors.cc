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
    case EEXIST:
      return absl::AlreadyExistsError(absl::StrCat("cannot create ", path, ": it is in the way; remove it"));
    default:
      return absl::UnavailableError(absl::StrCat("cannot create ", path, ": ", std::strerror(error)));
  }
}

std::string DtypeOf(const NamedTensor& tensor) {
  if (!tensor.dtype.empty()) return std::string(tensor.dtype);
  return tensor.format == Format::kFp32 ? "F32" : "BF16";
}

// The file that `path` names, through symbolic links. InvalidArgument: something else than a regular file is there.
absl::StatusOr<std::string> Resolve(std::string path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (error.value() == ELOOP) {
    return absl::InvalidArgumentError(absl::StrCat("cannot create ", path, ": its symbolic links never end"));
  }
  if (type != fs::file_type::regular && type != fs::file_type::not_found && type != fs::file_type::none) {
    const absl::string_view kind = type == fs::file_type::directory ? "folder"
                                   : type == fs::file_type::fifo    ? "FIFO"
                                   : type == fs::file_type::socket  ? "socket"
                                                                    : "device";
    return absl::InvalidArgumentError(absl::StrCat("cannot create ", path, ": it is a ", kind, "; name a file"));
  }
  while (true) {  // ends: the links were followed above
    const fs::path target = fs::read_symlink(path, error);
    if (error) return path;
    path = (fs::path(path).parent_path() / target).string();
  }
}

// A file that is being written, beside the one it will replace.
struct Part {
  std::string target, path;
  UniqueFd file;
};

absl::StatusOr<Part> Create(const std::string& path) {
  Part part;
  ASSIGN_OR_RETURN(part.target, Resolve(path));
  part.path = absl::StrCat(part.target, ".", getpid(), ".part");
  part.file = UniqueFd(open(part.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!part.file.valid()) return CannotCreate(errno == EEXIST ? part.path : part.target, errno);
  return part;
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

absl::Status Fill(const Part& part, const std::string& head, const std::vector<NamedTensor>& tensors) {
  RETURN_IF_ERROR(WriteAll(part.file.get(), head, part.target));
  for (const NamedTensor& tensor : tensors) RETURN_IF_ERROR(WriteAll(part.file.get(), tensor.bytes, part.target));
  if (fsync(part.file.get()) != 0) return Failed("sync", part.target);
  return rename(part.path.c_str(), part.target.c_str()) == 0 ? absl::OkStatus() : Failed("rename to", part.target);
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
    header[tensor.name] = {
        {"dtype", DtypeOf(tensor)}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i)));
  return absl::StrCat(length, text);
}

absl::Status CheckCanWrite(const std::string& path) {
  ASSIGN_OR_RETURN(const Part part, Create(path));
  unlink(part.path.c_str());
  return absl::OkStatus();
}

absl::StatusOr<int64_t> WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  ASSIGN_OR_RETURN(const std::string head, SafetensorsHead(tensors, metadata));
  ASSIGN_OR_RETURN(const Part part, Create(path));
  if (absl::Status status = Fill(part, head, tensors); !status.ok()) {
    unlink(part.path.c_str());
    return status;
  }
  int64_t total = static_cast<int64_t>(head.size());
  for (const NamedTensor& tensor : tensors) total += static_cast<int64_t>(tensor.bytes.size());
  return total;
}

}  // namespace shardmesh
