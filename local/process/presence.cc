#include "local/process/presence.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

flock LockOf(int place) {
  flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

}  // namespace

absl::StatusOr<Presence> Presence::Hold(int fd, int place) {
  UniqueFd own(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDWR | O_CLOEXEC));
  if (own.get() < 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot open the file of descriptor ", fd, " once more: ", std::strerror(errno)));
  }
  flock lock = LockOf(place);
  if (fcntl(own.get(), F_OFD_SETLK, &lock) == 0) return Presence(std::move(own));
  const int error = errno;
  if (error == EACCES || error == EAGAIN) {
    return absl::AlreadyExistsError(absl::StrCat("place ", place, " is held by a process that lives"));
  }
  return absl::UnavailableError(absl::StrCat("cannot mark place ", place, ": ", std::strerror(error)));
}

bool Presence::Sees(int place) const {
  flock lock = LockOf(place);
  return fcntl(own_.get(), F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace shardmesh
