// A file that a person names on the command line, whole.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace shardmesh {

// The bytes of the file at `path`, or of standard input when it is "-". NotFound: it cannot be read. ResourceExhausted:
// more than 256 MiB. Both name the file.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

}  // namespace shardmesh
