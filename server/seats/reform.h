// Who the members of a job are that goes on without one it lost, and on which mesh. Pure, thread-safe.
//
//   from "ddp=2,fsdp=2", ranks a b c d, without b; e is a spare:  a (shard 0), d (shard 1), c, e    on ddp=2,fsdp=2
//   the same without a spare:                                     a, d                              on ddp=2,fsdp=1
//   on two hosts, a b and c d, without the first; e f are spares of a third:  c d, e f              on ddp=2,fsdp=2
//   the same without a spare:                                     c, d                              on ddp=1,fsdp=2
//
// Ranks are numbered host by host, equally many on each (worker/control/host_ranks.h).
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

// Who may be a member.
struct Pool {
  std::vector<MemberRecord> holders;  // those that are left of the members, each with its rank then (MemberRecord::was)
  std::vector<Candidate> spares;      // workers that may join them
  // Whether the job may be on several hosts: other hosts reach all holders. Else all are of one host.
  bool spans_hosts = false;
  bool on_several = false;  // whether it was
  int copies = 1;           // JobSpec::copies
};

// `defined`: the mesh that the job was given. `from`: its mesh when it was READY last.
//
// On one host the mesh is MeshFor(defined, workers). Members by rank are the lowest holder of each shard, in the order of
// shards; then the other holders by old rank; then the spares that serve the fewest jobs (then by name).
//
// On several the mesh is the largest that equally many workers on each of some hosts can have: that, or `defined` with
// fewer replicas. Of those with as many ranks the one with the most ReplicaDomains wins, then the one on the fewest
// hosts, then the one that keeps the shards. Each host has its holders by old rank and then its spares, and the host of
// the lowest old rank comes first.
//
// So rank 0 was a member. FailedPrecondition: there is no holder of a shard; the message is the end of a sentence.
// REQUIRES: the meshes are valid, every holder's rank is in `from`.
absl::StatusOr<Reformed> Reform(const MeshSpec& defined, const MeshSpec& from, Pool pool);

// The same on a mesh that is given: on one host members by rank are the holders by old rank, then the spares. A job on
// one host stays there if it can. Holders that have no place are `others`, and may be the only ones that have their
// shards. FailedPrecondition: there are not so many workers; the message is the end of a sentence.
absl::StatusOr<Reformed> FormOn(const MeshSpec& mesh, Pool pool);

}  // namespace shardmesh
