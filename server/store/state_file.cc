#include "server/store/state_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/file_error.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

// sqlite.org/fileformat.html, "The Database Header". Numbers are big-endian.
constexpr size_t kHeaderBytes = 108, kPageSizeAt = 16, kWriteVersionAt = 18, kChangesAt = 24, kPagesAt = 28,
                 kApplicationIdAt = 68, kPagesValidForAt = 92,
                 kCellsAt = 103;              // of the first page, which lists the tables
constexpr char kMagic[] = "SQLite format 3";  // with its NUL: 16 bytes
constexpr unsigned char kWriteAheadLog = 2;

using Header = std::array<unsigned char, kHeaderBytes>;

uint32_t NumberAt(const Header& header, size_t at) {
  return uint32_t{header[at]} << 24 | uint32_t{header[at + 1]} << 16 | uint32_t{header[at + 2]} << 8 | header[at + 3];
}

int64_t BytesOf(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) == 0 ? info.st_size : 0;
}

absl::Status Damaged(const std::string& path, absl::string_view what) {
  return absl::DataLossError(
      absl::StrCat("state file ", path, " ", what, "; restore a copy of it, or move it away to start without jobs"));
}

absl::Status Look(const std::string& path, const Header& header, int64_t bytes) {
  const bool has_log = BytesOf(path + "-wal") > 0, has_journal = BytesOf(path + "-journal") > 0;
  if (bytes == 0 && has_journal) return absl::OkStatus();  // the first transaction was not finished: SQLite undoes it
  if (bytes == 0) return Damaged(path, "is empty: a state file never is, so what it held was lost");
  const auto kept = static_cast<size_t>(std::min(bytes, static_cast<int64_t>(sizeof(kMagic))));
  if (std::memcmp(header.data(), kMagic, kept) != 0) {
    return Damaged(path, "is not a usable SQLite database (it does not begin as one)");
  }
  if (bytes < static_cast<int64_t>(kHeaderBytes)) {
    return Damaged(path, absl::StrCat("was cut: it has ", bytes, " bytes, less than its header"));
  }
  const bool logs = header[kWriteVersionAt] == kWriteAheadLog;
  const uint32_t application = NumberAt(header, kApplicationIdAt);
  if (application == 0 && logs && has_log) return absl::OkStatus();  // all of it may lie in the log
  // Older builds kept the newest changes in a log beside the file until they ended in order.
  const int64_t short_size = int64_t{header[kPageSizeAt]} << 8 | header[kPageSizeAt + 1];
  const int64_t page = short_size == 1 ? 65536 : short_size;
  const bool no_tables = header[kCellsAt] == 0 && header[kCellsAt + 1] == 0;
  if (application == 0 && logs && bytes == page && no_tables) {
    return Damaged(path, absl::StrCat("has no contents: they are in its write-ahead log, which is not there; copy ",
                                      path, "-wal too"));
  }
  if (application != kStateApplicationId) {
    return absl::FailedPreconditionError(
        absl::StrCat("state file ", path, " belongs to another program; give --state another file"));
  }
  const bool counted = NumberAt(header, kChangesAt) == NumberAt(header, kPagesValidForAt);
  if (has_log || has_journal || page == 0) return absl::OkStatus();
  if (bytes % page == 0 && (!counted || bytes / page >= NumberAt(header, kPagesAt))) return absl::OkStatus();
  return Damaged(path, absl::StrCat("was cut: it has ", bytes, " bytes, and ", page * NumberAt(header, kPagesAt),
                                    " belong to it"));
}

}  // namespace

absl::Status LookAtStateFile(const std::string& path, bool* exists) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  *exists = fd >= 0 || errno != ENOENT;
  if (!*exists) return absl::OkStatus();
  struct stat info = {};
  Header header = {};
  ssize_t got = -1;
  int error = errno;
  if (fd >= 0) {
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) got = pread(fd, header.data(), header.size(), 0);
    error = errno;
    close(fd);
  }
  if (got >= 0) return Look(path, header, info.st_size);
  return absl::UnavailableError(absl::StrCat(
      "state file ", path, " cannot be read: ",
      fd >= 0 && !S_ISREG(info.st_mode) ? "it is no regular file" : std::strerror(error), "; check --state"));
}

void MakeHiddenFile(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd >= 0) close(fd);
}

void HideFile(const std::string& path) { (void)chmod(path.c_str(), 0600); }

absl::Status SyncFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (synced) return absl::OkStatus();
  return FailedTo("sync", path, error);
}

absl::StatusOr<FileId> FileIdOf(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) == 0) return FileId{info.st_dev, info.st_ino};
  const std::string text = absl::StrCat("state file ", path, ": ", std::strerror(errno));
  return errno == ENOENT ? absl::NotFoundError(text) : absl::UnavailableError(text);
}

}  // namespace shardmesh
