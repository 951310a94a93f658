// Holds on shared memory: who maps a publication holds it, and the kernel knows until when.
//
// A hold is an open-file-description lock (fcntl(2), F_OFD_SETLK) for reading on one byte of a memfd, by a description
// that its holder got for himself (Segment::ReadOnlyFd). It ends when it is let go, or with the last descriptor and the
// last mapping of that description: so neither a crash of the holder nor one of whoever granted it loses or keeps a
// hold. Processes that a holder forks have its description too, unless it keeps it from them (not_in_children.h) and
// maps the memory by another. Different holders use different bytes, their places, so that
// one can be told from another. Thread-safe.
#pragma once

#include "absl/status/status.h"

namespace shardmesh {

// Holds, or lets go, the file that `fd` is open on. Again: no effect. Internal: the system refuses.
absl::Status HoldFile(int fd, int place);
void LetFileGo(int fd, int place);

// Whether a description other than that of `fd` holds the file, at any place or at one. A file that cannot be asked
// about counts as held.
bool IsFileHeld(int fd);
bool IsFileHeldAt(int fd, int place);

}  // namespace shardmesh
