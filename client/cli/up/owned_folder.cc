#include "client/cli/up/owned_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/file_error.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

constexpr char kOwner[] = "owner";

void RemoveIfLeftOver(const fs::path& folder) {
  struct stat info = {};
  if (lstat(folder.c_str(), &info) != 0 || info.st_uid != geteuid()) return;
  const UniqueFd owner(open((folder / kOwner).c_str(), O_RDONLY | O_CLOEXEC));
  if (!owner.valid() || flock(owner.get(), LOCK_EX | LOCK_NB) != 0) return;
  // The owner's file last: its processes may still be ending and have files here, and then the next one finds the folder.
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() == kOwner) continue;
    fs::remove_all(entry->path(), error);
    if (error) return;
  }
  if (!error) fs::remove_all(folder, error);
}

}  // namespace

absl::StatusOr<std::unique_ptr<OwnedFolder>> OwnedFolder::Create(const std::string& base, const std::string& prefix) {
  std::error_code error;
  for (fs::directory_iterator entry(base, error), end; !error && entry != end; entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), prefix + "-")) RemoveIfLeftOver(entry->path());
  }
  std::string path = absl::StrCat(base, "/", prefix, "-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) return FailedTo("make the folder", path, errno);
  std::unique_ptr<OwnedFolder> folder(new OwnedFolder(std::move(path)));
  RETURN_IF_ERROR(folder->Lock());
  return folder;
}

absl::Status OwnedFolder::Lock() {
  const std::string unlocked = path_ + "/new", locked = absl::StrCat(path_, "/", kOwner);
  lock_ = UniqueFd(open(unlocked.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock_.valid()) return FailedTo("make", unlocked, errno);
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) return FailedTo("lock", unlocked, errno);
  return rename(unlocked.c_str(), locked.c_str()) == 0 ? absl::OkStatus() : FailedTo("make", locked, errno);
}

OwnedFolder::~OwnedFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace shardmesh
