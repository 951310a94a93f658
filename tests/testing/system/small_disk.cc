#include "tests/testing/system/small_disk.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::testing {
namespace {

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("cannot ", what, ": ", std::strerror(errno)));
}

// A namespace of mounts; as who has no rights outside, in a namespace of users, too, with the same numbers.
absl::Status LeaveMountNamespace() {
  static bool left = false;
  if (left) return absl::OkStatus();
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return Failed("make a namespace of mounts");
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << user << " " << user << " 1";
    std::ofstream("/proc/self/gid_map") << group << " " << group << " 1";
  }
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return Failed("keep mounts to itself");
  left = true;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SmallDisk>> SmallDisk::Mount(const std::string& folder, int64_t bytes) {
  RETURN_IF_ERROR(LeaveMountNamespace());
  if (mkdir(folder.c_str(), 0777) != 0) return Failed(absl::StrCat("make ", folder));
  if (mount("small", folder.c_str(), "tmpfs", 0, absl::StrCat("size=", bytes).c_str()) != 0) {
    return Failed(absl::StrCat("mount a file system at ", folder));
  }
  return std::unique_ptr<SmallDisk>(new SmallDisk(folder));
}

SmallDisk::~SmallDisk() { umount2(folder_.c_str(), MNT_DETACH); }

}  // namespace shardmesh::testing
