#include "checkpoint/file_changes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

absl::Status BeforeChange() { return ErrorAt(FaultPoint::kFileChange); }

absl::Status Sync(const std::string& path, int flags) {
  RETURN_IF_ERROR(BeforeChange());
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | flags));
  if (!fd.valid() || fsync(fd.get()) != 0) return FailedTo("sync", path, errno);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<UniqueFd> MakeFile(const std::string& path) {
  RETURN_IF_ERROR(BeforeChange());
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!fd.valid()) return FailedTo("make", path, errno);
  return fd;
}

absl::Status SetLength(int fd, int64_t bytes, const std::string& path) {
  RETURN_IF_ERROR(BeforeChange());
  int error = bytes > 0 ? fallocate(fd, 0, 0, bytes) == 0 ? 0 : errno : 0;
  if (error == EOPNOTSUPP || error == ENOSYS) error = ftruncate(fd, bytes) == 0 ? 0 : errno;
  if (error == 0) return absl::OkStatus();
  return Annotate(FailedTo("make", path, error), absl::StrCat(bytes, " bytes are needed"));
}

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    RETURN_IF_ERROR(BeforeChange());
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FailedTo("write", path, errno);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status SyncFile(const std::string& path) { return Sync(path, O_NOFOLLOW); }

absl::Status RemoveFile(const std::string& path) {
  RETURN_IF_ERROR(BeforeChange());
  return unlink(path.c_str()) == 0 ? absl::OkStatus() : FailedTo("remove", path, errno);
}

absl::Status MakeFolders(const std::string& folder) {
  fs::path path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // it was named with a slash at its end
  std::vector<fs::path> missing;                        // from the innermost on
  std::error_code error;
  for (; path.has_relative_path() && !fs::exists(path, error); path = path.parent_path()) missing.push_back(path);
  while (!missing.empty()) {
    const std::string next = missing.back().string();
    missing.pop_back();
    RETURN_IF_ERROR(BeforeChange());
    if (mkdir(next.c_str(), 0777) != 0 && errno != EEXIST) return FailedTo("make the folder", next, errno);
    RETURN_IF_ERROR(SyncFolder(fs::path(next).parent_path().string()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> MakeNewFolder(std::string path) {
  RETURN_IF_ERROR(BeforeChange());
  const std::string pattern = path;
  if (mkdtemp(path.data()) == nullptr) return FailedTo("make the folder", pattern, errno);
  return path;
}

absl::Status SyncFolder(const std::string& path) { return Sync(path, O_DIRECTORY); }

absl::Status Rename(const std::string& from, const std::string& to) {
  RETURN_IF_ERROR(BeforeChange());
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return FailedTo(absl::StrCat("rename ", from, " to"), to, errno);
}

absl::Status RemoveFolder(const std::string& path) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    entries.push_back(entry->path());
  }
  for (const fs::path& entry : entries) {
    RETURN_IF_ERROR(BeforeChange());
    fs::remove_all(entry, error);
    if (error) return FailedTo("remove", entry.string(), error.value());
  }
  RETURN_IF_ERROR(BeforeChange());
  fs::remove(path, error);
  return error ? FailedTo("remove", path, error.value()) : absl::OkStatus();
}

}  // namespace shardmesh
