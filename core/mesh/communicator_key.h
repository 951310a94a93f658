// CommunicatorKey: one name for every set of ranks, so that groups of equal ranks use one communicator, whatever mesh,
// dimension and order they come from. It opens no communicators, and counts no references to them.
// Pure and thread-safe.
//
//   Communicators({{cube, {"ddp", "fsdp"}}, {cube.Flatten({"fsdp", "ddp"}, "dp"), {"dp"}}})
//     2 communicators, each with 2 uses: [0 2 4 6] and [1 3 5 7]
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "core/mesh/mesh.h"

namespace shardmesh {

// 32 lower-case hexadecimal digits: the XXH3 128-bit digest of the different ranks, ascending, each as a 64-bit
// little-endian integer. The same on every machine.
std::string CommunicatorKey(std::vector<Rank> ranks);

// The groups of a mesh along some of its dimensions.
struct MeshGroups {
  Mesh mesh;
  std::vector<std::string> names;
};

struct Communicator {
  struct Use {
    size_t asked;  // index into what was asked
    size_t group;  // index into its mesh's Groups(names)

    friend bool operator==(const Use& a, const Use& b) { return a.asked == b.asked && a.group == b.group; }
  };

  std::string key;
  std::vector<Rank> ranks;  // ascending
  std::vector<Use> uses;    // in the order asked; more than one: they share this communicator
};

// The communicators that all groups need together, in the order of their first uses. Errors as Mesh::Groups.
absl::StatusOr<std::vector<Communicator>> Communicators(const std::vector<MeshGroups>& asked);

}  // namespace shardmesh
