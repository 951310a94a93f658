// What to say where a descriptor could not be made: where the limit of them is why, its value and how to raise it.
// Thread-safe.
#pragma once

#include <string>

namespace shardmesh {

// strerror(error); of EMFILE with "RLIMIT_NOFILE is 64; raise it (ulimit -n 4096)" behind it.
std::string DescriptorError(int error);

// "RLIMIT_NOFILE is 64; raise it (ulimit -n 4096)": of this process.
std::string DescriptorLimit();

}  // namespace shardmesh
