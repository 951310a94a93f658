#include "checkpoint/folder_access.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "checkpoint/file_changes.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "core/base/secret.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr int kFolderFlags = O_PATH | O_DIRECTORY | O_CLOEXEC;
constexpr size_t kShown = 300;

std::string Shown(absl::string_view path) { return absl::StrCat("\"", absl::CEscape(path.substr(0, kShown)), "\""); }

// "/a//b/" -> a, b. InvalidArgument: a part by which a path leaves the folder before it.
absl::StatusOr<std::vector<std::string>> PartsOf(absl::string_view path) {
  std::vector<std::string> parts = absl::StrSplit(path, '/', absl::SkipEmpty());
  const bool plain = absl::StartsWith(path, "/") && path.find('\0') == absl::string_view::npos &&
                     std::none_of(parts.begin(), parts.end(), [](const auto& p) { return p == "." || p == ".."; });
  if (plain) return parts;
  return absl::InvalidArgumentError(
      absl::StrCat(Shown(path), " is no absolute path without \".\" and \"..\" in it; name the folder by one"));
}

// The first bytes of a file of the folder, at most `limit`; nothing: it is no regular file that can be read.
std::optional<std::string> Beginning(const UniqueFd& folder, const char* name, size_t limit) {
  const UniqueFd fd(openat(folder.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (!fd.valid() || fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  std::string bytes(limit, '\0');
  ssize_t got = 0;
  do {
    got = pread(fd.get(), bytes.data(), bytes.size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return std::nullopt;
  bytes.resize(static_cast<size_t>(got));
  return bytes;
}

absl::Status NotSavedInto(absl::string_view folder) {
  return absl::PermissionDeniedError(absl::StrCat(
      "the caller has not proved that it saves a checkpoint into ", Shown(folder),
      ": a worker writes only into a hidden folder .step-... without a manifest, whose file ", kSecretFile,
      " holds the secret that the request says. Save by SaveCheckpoint or shardctl checkpoint, into a folder that this "
      "worker sees under the same path, as the same user; no symbolic link below a --checkpoint-root is followed"));
}

absl::Status NotLoadedFrom(absl::string_view folder) {
  return absl::PermissionDeniedError(absl::StrCat(
      "the caller has not proved that it can read a checkpoint in ", Shown(folder),
      ": a worker reads only a folder whose manifest.json has the step and the digest that the request says. Restore "
      "by RestoreCheckpoint or shardctl restore, from a folder that this worker sees under the same path, as a user who "
      "may read it; no symbolic link below a --checkpoint-root is followed"));
}

}  // namespace

std::string NewSecret() {
  return absl::BytesToHexString(RandomBytes(kSecretBytes / 2));
}

absl::StatusOr<FolderAccess> FolderAccess::Create(const std::vector<std::string>& roots) {
  FolderAccess access;
  for (const std::string& root : roots) {
    if (root.empty()) return absl::InvalidArgumentError("it is empty; name a folder");
    std::error_code error;
    const std::string path = std::filesystem::absolute(root, error).string();
    if (error) return FailedTo("find", root, error.value());
    ASSIGN_OR_RETURN(const std::vector<std::string> parts, PartsOf(path));
    access.roots_.push_back(absl::StrCat("/", absl::StrJoin(parts, "/")));
    if (!UniqueFd(open(access.roots_.back().c_str(), kFolderFlags)).valid()) return FailedTo("open", root, errno);
  }
  return access;
}

absl::StatusOr<UniqueFd> FolderAccess::Open(const std::string& folder) const {
  ASSIGN_OR_RETURN(const std::vector<std::string> parts, PartsOf(folder));
  if (roots_.empty()) return UniqueFd(open(folder.c_str(), kFolderFlags));
  for (const std::string& root : roots_) {
    const std::vector<std::string> above = absl::StrSplit(root, '/', absl::SkipEmpty());
    if (above.size() > parts.size() || !std::equal(above.begin(), above.end(), parts.begin())) continue;
    UniqueFd fd(open(root.c_str(), kFolderFlags));
    for (size_t i = above.size(); i < parts.size() && fd.valid(); ++i) {
      fd = UniqueFd(openat(fd.get(), parts[i].c_str(), kFolderFlags | O_NOFOLLOW));
    }
    return fd;
  }
  return absl::PermissionDeniedError(absl::StrCat(Shown(folder), " is below no --checkpoint-root of this worker (",
                                                  absl::StrJoin(roots_, ", "), "); choose a folder below one of them"));
}

absl::StatusOr<UniqueFd> FolderAccess::OpenToSave(const std::string& folder, absl::string_view secret) const {
  ASSIGN_OR_RETURN(UniqueFd fd, Open(folder));
  if (!fd.valid()) return NotSavedInto(folder);
  const std::vector<std::string> parts = absl::StrSplit(folder, '/', absl::SkipEmpty());
  const std::optional<std::string> held = Beginning(fd, kSecretFile, kSecretBytes + 1);
  struct stat info = {};
  const bool proved = !parts.empty() && absl::StartsWith(parts.back(), kHiddenStep) && held.has_value() &&
                      secret.size() == kSecretBytes && SameSecret(*held, secret) && fstatat(fd.get(), kManifestFile, &info, AT_SYMLINK_NOFOLLOW) != 0 &&
                      errno == ENOENT;
  if (!proved) return NotSavedInto(folder);
  return fd;
}

absl::StatusOr<UniqueFd> FolderAccess::OpenToLoad(const std::string& folder, int64_t step, uint64_t digest) const {
  ASSIGN_OR_RETURN(UniqueFd fd, Open(folder));
  if (!fd.valid()) return NotLoadedFrom(folder);
  const std::optional<std::string> text = Beginning(fd, kManifestFile, kManifestHead);
  const std::optional<ManifestHead> head = text.has_value() ? ParseManifestHead(*text) : std::nullopt;
  if (!head.has_value() || head->step != step || head->digest != digest) return NotLoadedFrom(folder);
  return fd;
}

}  // namespace shardmesh
