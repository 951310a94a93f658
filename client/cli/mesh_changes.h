// The operations on a mesh as `shardctl mesh` takes them, each an option and its text:
//   --slice a,b                keep these dimensions
//   --transpose b,a            all dimensions, in their new order
//   --flatten a,b=name         make one dimension of several
//   --unflatten a=b:2,c:4      make several dimensions of one, the slowest first
//   --concatenate a/b,c=bc     the dimensions of parts side by side; a part is a slice (a) or one flattened (b,c=bc)
//   --restrict 0,1,4,5         only these ranks
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/mesh.h"

namespace shardmesh {

// Option `--NAME` with its help, and an example of its text.
struct MeshOption {
  const char* name;
  const char* help;
  const char* example;
};

inline constexpr MeshOption kMeshOptions[] = {
    {"--slice", "Keep these dimensions, in the mesh's own order", "a,b"},
    {"--transpose", "All dimensions, in their new order", "b,a"},
    {"--flatten", "Make one dimension of several, the first slowest", "a,b=ab"},
    {"--unflatten", "Make several dimensions of one, the first slowest", "a=b:2,c:4"},
    {"--concatenate", "Dimensions of parts side by side; a part is a slice, or a slice flattened", "c/a,b=ab"},
    {"--restrict", "Only these ranks; they must be a grid", "0,1,4,5"},
};

using MeshChange = std::function<absl::StatusOr<Mesh>(const Mesh&)>;

// What `option`, one of the names above, does with a mesh; it fails as the operation in core/mesh.h.
// InvalidArgument: `text` does not have the option's form; starts with the option and has its example.
// REQUIRES: a known option.
absl::StatusOr<MeshChange> ParseMeshOption(absl::string_view option, absl::string_view text);

}  // namespace shardmesh
