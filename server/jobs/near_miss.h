// NearestName: the parameter that a mistyped name most likely meant, for error messages. Pure, thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/job/job.h"

namespace shardmesh {

// A name with at most two insertions, deletions or replacements between it and `wanted`; or one that is `wanted`
// without leading segments, or the other way round. Empty: none is near. Looks at whole names of at most 256 bytes.
std::string NearestName(absl::string_view wanted, const std::vector<ParameterSpec>& parameters);

}  // namespace shardmesh
