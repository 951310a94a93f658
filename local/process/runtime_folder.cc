#include "local/process/runtime_folder.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

bool IsOwnFolder(const std::string& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
         access(path.c_str(), W_OK | X_OK) == 0;
}

// As systemd-logind notes it.
bool Lingers() {
  std::vector<char> buffer(1 << 14);
  passwd entry;
  passwd* found = nullptr;
  if (getpwuid_r(geteuid(), &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) return false;
  return access(absl::StrCat("/var/lib/systemd/linger/", found->pw_name).c_str(), F_OK) == 0;
}

}  // namespace

std::string RuntimeFolder() {
  const std::string name = absl::StrCat("shardmesh-", geteuid()), in_run = absl::StrCat("/run/", name);
  if (IsOwnFolder(in_run) || access("/run", W_OK | X_OK) == 0) return in_run;
  const char* const own = std::getenv("XDG_RUNTIME_DIR");
  if (own != nullptr && own[0] == '/' && IsOwnFolder(own) && Lingers()) return absl::StrCat(own, "/shardmesh");
  return absl::StrCat("/tmp/", name);
}

}  // namespace shardmesh
