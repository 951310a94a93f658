// FailedTo: the status of a call of the system on a file that failed, chosen by what the caller does next.
// Thread-safe.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// "cannot VERB PATH: ", and what the system calls `error` (errno). ResourceExhausted: there is no room: a full disk, a
// quota, the largest file that this process or file system may have. PermissionDenied: also of a file system that is
// mounted for reading. NotFound: the path or a folder of it is not there, or is no folder. AlreadyExists: something is
// in the way. Unavailable: everything else.
inline absl::Status FailedTo(absl::string_view verb, absl::string_view path, int error) {
  const std::string message = absl::StrCat("cannot ", verb, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EEXIST:
    case ENOTEMPTY:
      return absl::AlreadyExistsError(message);
    default:
      return absl::UnavailableError(message);
  }
}

}  // namespace shardmesh
