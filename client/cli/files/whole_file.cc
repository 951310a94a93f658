#include "client/cli/files/whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "core/base/file_error.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"

namespace shardmesh {
namespace {

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
      return FailedTo("create", path, error);
  }
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
    if (written < 0) return FailedTo("write", path, errno);
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status Fill(const Part& part, absl::Span<const absl::string_view> pieces) {
  for (const absl::string_view piece : pieces) RETURN_IF_ERROR(WriteAll(part.file.get(), piece, part.target));
  if (fsync(part.file.get()) != 0) return FailedTo("sync", part.target, errno);
  const bool renamed = rename(part.path.c_str(), part.target.c_str()) == 0;
  return renamed ? absl::OkStatus() : FailedTo("rename to", part.target, errno);
}

}  // namespace

absl::Status CheckCanWrite(const std::string& path) {
  ASSIGN_OR_RETURN(const Part part, Create(path));
  unlink(part.path.c_str());
  return absl::OkStatus();
}

absl::StatusOr<int64_t> WriteWholeFile(const std::string& path, absl::Span<const absl::string_view> pieces) {
  ASSIGN_OR_RETURN(const Part part, Create(path));
  if (absl::Status status = Fill(part, pieces); !status.ok()) {
    unlink(part.path.c_str());
    return status;
  }
  int64_t total = 0;
  for (const absl::string_view piece : pieces) total += static_cast<int64_t>(piece.size());
  return total;
}

}  // namespace shardmesh
