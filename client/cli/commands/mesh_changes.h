// The operations on a mesh as `shardctl mesh` takes them, each an option and its text:
//   --slice a,b                keep these dimensions, in this order
//   --transpose b,a            all dimensions, in their new order
//   --flatten a,b=name         make one dimension of several
//   --unflatten a=b:2,c:4      make several dimensions of one, the slowest first
//   --concatenate a/b,c=bc     the dimensions of parts side by side; a part is a slice (a) or one flattened (b,c=bc)
//   --restrict 0,1,4,5         only these ranks
#pragma once

#include <functional>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/mesh/mesh.h"

namespace shardmesh {

using MeshChange = std::function<absl::StatusOr<Mesh>(const Mesh&)>;

// An option, its help, and an example of its text.
struct MeshOption {
  const char* name;
  const char* help;
  const char* example;
  std::optional<MeshChange> (*parse)(absl::string_view text);  // nullopt: the text has another form
};

// In the order of the list above.
absl::Span<const MeshOption> MeshOptions();

// What an option with this text does with a mesh; it fails as the operation in core/mesh/mesh.h.
// InvalidArgument: `text` does not have the option's form; starts with the option and has its example.
absl::StatusOr<MeshChange> ParseMeshOption(const MeshOption& option, absl::string_view text);

}  // namespace shardmesh
