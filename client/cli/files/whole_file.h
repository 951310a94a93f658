// Files that a person asked for, written so that they appear whole or not at all. Thread-safe for different files.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace shardmesh {

// Whether WriteWholeFile could make this file now; leaves nothing behind. To be asked before long work.
//   NotFound: its folder is not there.
//   InvalidArgument: it is there and, through symbolic links, no regular file (the message says what), or it lies in
//     something that is no folder.
//   AlreadyExists: what is written beside it first (FILE.PID.part) is there.
//   PermissionDenied: no file may be made in its folder.
//   ResourceExhausted: there is no room for it. Unavailable: anything else (with errno).
absl::Status CheckCanWrite(const std::string& path);

// Writes the pieces, one behind the other: into a file beside it, synced, then renamed over an old one. A symbolic link
// stays, and the file it names is written. Returns its bytes. Errors as CheckCanWrite; nothing is left of it then.
absl::StatusOr<int64_t> WriteWholeFile(const std::string& path, absl::Span<const absl::string_view> pieces);

}  // namespace shardmesh
