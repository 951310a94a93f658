// On which mesh a job goes on when fewer workers are there than it was defined for. Pure, thread-safe.
//
// As many replicas as before, as long as no shard becomes more than twice as large; else fewer. Examples, of
// "ddp=2,fsdp=4":  7, 6 workers: ddp=2,fsdp=3    5, 4: ddp=2,fsdp=2    3: ddp=1,fsdp=3    2: ddp=1,fsdp=2
#pragma once

#include <cstdint>
#include <vector>

#include "core/mesh/mesh_spec.h"

namespace shardmesh {

// The mesh of at most `num_workers` ranks that a job defined with `mesh` has when only so many are there; `mesh` itself
// where they are enough. Names, order and roles of the dimensions stay; else the first of each role has that role's
// whole size, and the others 1. It has no fewer ranks than `mesh` has shards, if there are so many workers.
// REQUIRES: mesh.Validate() is OK, num_workers >= 1.
MeshSpec MeshFor(const MeshSpec& mesh, int64_t num_workers);

// The same with `replicas` of its replicas, and all its shards; dimensions as MeshFor. REQUIRES: 1 <= replicas <= the
// mesh's.
MeshSpec WithReplicas(const MeshSpec& mesh, int64_t replicas);

// On so many hosts, with equally many ranks on each, numbered host by host: in how many groups of hosts each shard has a
// replica of its own. A job loses no shard while it loses all groups but one. 1: one host may have all replicas of a
// shard. REQUIRES: hosts divides the number of ranks.
int64_t ReplicaDomains(const MeshSpec& mesh, int64_t hosts);

// The numbers of hosts that a job with so many `copies` of each shard may be placed on, the best first: those with the
// most ReplicaDomains, at least as many as copies where there are other hosts to keep them, and of these the fewest hosts.
std::vector<int64_t> HostCounts(const MeshSpec& mesh, int copies);

// The rank that keeps the copy of another one's shard (JobSpec::copies), of a job on so many hosts: at its place on the
// next host. REQUIRES: hosts divides ranks.
int64_t CopyKeeper(int64_t rank, int64_t ranks, int64_t hosts);

// The shard that a rank of the mesh holds, as Plan::PlaceOf (core/job/plan.h). REQUIRES: 0 <= rank < mesh.NumRanks().
int64_t ShardOf(const MeshSpec& mesh, int64_t rank);

}  // namespace shardmesh
