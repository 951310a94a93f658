// A copy past the caches: streaming stores, which do not read first what they overwrite. For more bytes than the caches
// hold; the memcpy of the C library does so only from tens of MiB on. Thread-safe.
#pragma once

#include <cstdint>

namespace shardmesh {

// As std::memcpy, of any bytes to any place; a release-store may follow. REQUIRES: no overlap.
void StreamingCopy(void* to, const void* from, int64_t bytes);

}  // namespace shardmesh
