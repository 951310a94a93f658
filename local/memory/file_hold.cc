#include "local/memory/file_hold.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

struct flock LockOf(short type, off_t begin, off_t bytes) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = begin;
  lock.l_len = bytes;  // 0: to the end
  return lock;
}

// Whether a lock for writing would meet another description's.
bool Meets(int fd, off_t begin, off_t bytes) {
  struct flock lock = LockOf(F_WRLCK, begin, bytes);
  return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace

absl::Status HoldFile(int fd, int place) {
  struct flock lock = LockOf(F_RDLCK, place, 1);
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("descriptor ", fd, " cannot be locked: ", strerror(errno)));
}

void LetFileGo(int fd, int place) {
  struct flock lock = LockOf(F_UNLCK, place, 1);
  fcntl(fd, F_OFD_SETLK, &lock);
}

bool IsFileHeld(int fd) { return Meets(fd, 0, 0); }
bool IsFileHeldAt(int fd, int place) { return Meets(fd, place, 1); }

}  // namespace shardmesh
