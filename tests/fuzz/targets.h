// What the fuzzers call: each takes any bytes, and ends the process when a promise of the library is broken.
// `tools/fuzz.sh` builds them with libFuzzer and runs them; seeds_test runs the kept inputs in every ordinary build.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace shardmesh::fuzz {

// Fields separated by newlines: root wrappers, literals and wrapped-at prefixes (each a list separated by commas), then
// names. Promises: a canonical name is valid and is its own canonical name; a table answers what was put into it.
void Names(absl::string_view input);

// A JSON layout specification (client/cli/layout_spec.h). Promises: an error, or a layout of which every bucket is
// accounted for: stretches ascend, lie inside of their shard, and sum up to the tensors.
void PlanSpec(absl::string_view input);

}  // namespace shardmesh::fuzz
