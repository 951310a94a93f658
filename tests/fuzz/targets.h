// What the fuzzers call: each takes any bytes, and ends the process when a promise of the library is broken.
// `tools/fuzz.sh` builds them with libFuzzer and runs them; seeds_test runs the kept inputs in every ordinary build.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace shardmesh::fuzz {

// Fields separated by newlines: root wrappers, literals and wrapped-at prefixes (each a list separated by commas), then
// names. Promises: a canonical name is valid and is its own canonical name; a table answers what was put into it.
void Names(absl::string_view input);

// A JSON layout specification (client/cli/plan/layout_spec.h). Promises: an error, or a layout of which every bucket is
// accounted for: stretches ascend, lie inside of their shard, and sum up to the tensors.
void PlanSpec(absl::string_view input);

// A checkpoint's manifest (checkpoint/manifest.h): as it is, and with its checksum put right, so that the rest is
// reached. Promises: an error, or a manifest whose text gives it back; its job has no files, or files that its tensors
// fill without gaps.
void Manifests(absl::string_view input);

// Lines of a name, a dtype and bytes, divided by tabs, as the tensors of a safetensors file. Promises: an error, or a
// head that a reader of the format takes: its length, JSON with every name once, offsets without gaps. And the input as
// the header of a file that is read: an error, or tensors that fill the file, each with the bytes of its shape.
void SafetensorsHeads(absl::string_view input);

}  // namespace shardmesh::fuzz
