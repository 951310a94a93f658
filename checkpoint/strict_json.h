// JSON from files that anybody may have written: what a parser would forgive is refused here. Pure and thread-safe.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// Whether brackets lie at most `max_depth` deep in each other; what destroys deeper ones recurses as deep.
bool IsShallowJson(absl::string_view text, int max_depth = 64);

// An object, in which no object has a key twice. DataLoss: the text is none; says why.
absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text);

}  // namespace shardmesh
