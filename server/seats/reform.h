// Who the members of a job are that goes on without one it lost, and on which mesh. Pure, thread-safe.
//
//   from "ddp=2,fsdp=2", ranks a b c d, without b; e is a spare:  a (shard 0), d (shard 1), c, e    on ddp=2,fsdp=2
//   the same without a spare:                                     a, d                              on ddp=2,fsdp=1
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "core/mesh/mesh_spec.h"
#include "server/seats/assignment.h"
#include "server/store/records.h"

namespace shardmesh {

struct Reformed {
  MeshSpec mesh;
  std::vector<MemberRecord> members;  // by rank, none ready
  std::vector<MemberRecord> others;   // holders that the mesh has no place for, by old rank
};

// `defined`: the mesh that the job was given. `from`: its mesh when it was READY last. `holders`: those that are left
// of its members then, each with its rank there (MemberRecord::was). `spares`: workers that may join them.
//
// The mesh is MeshFor(defined, all of these). Members by rank: the lowest holder of each shard, in the order of shards,
// so rank 0 was a member; then the other holders by old rank; then the spares that serve the fewest jobs (then by
// name). FailedPrecondition: there is no holder of a shard; the message is the end of a sentence.
// REQUIRES: the meshes are valid, every holder's rank is in `from`.
absl::StatusOr<Reformed> Reform(const MeshSpec& defined, const MeshSpec& from, std::vector<MemberRecord> holders,
                                std::vector<Candidate> spares);

// The same on a mesh that is given. Members by rank: the holders by old rank, then the spares; holders that have no
// place are `others`, and may be the only ones that have their shards. FailedPrecondition: there are not so many; the
// message is the end of a sentence.
absl::StatusOr<Reformed> FormOn(const MeshSpec& mesh, std::vector<MemberRecord> holders, std::vector<Candidate> spares);

}  // namespace shardmesh
