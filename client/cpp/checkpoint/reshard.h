// Bringing a job to another mesh while it trains: the same weights, states and versions, on other workers of its host.
//
//   ASSIGN_OR_RETURN(job, ReshardJob(client, "llama", ParseMeshSpec("fsdp=4").value()));
//
// Thread-safe; it blocks.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {

struct ReshardOptions {
  absl::Duration timeout = absl::Minutes(10);
  // So many of all workers that take part have their memory; the last call is with all. May be empty.
  std::function<void(int prepared, int all)> progress;
};

// The job's workers to be build their memory while it trains on; then its epoch ends between two steps, and it is READY
// again at a later one, on `mesh`: this returns it. Its trainers see UNAVAILABLE as when a member is lost, call
// Client::Reopen, attach again and go on: no bit differs. To the mesh that it has: at once, nothing happens.
//   NotFound: no such job. InvalidArgument, ResourceExhausted: it cannot have that mesh.
//   FailedPrecondition: there are not enough workers; it is on its way to another mesh; or it failed.
//   Unimplemented: not where it is, or with what it has (core/job/support.h).
//   Aborted: it goes on without that, since a worker that was to take part ended, or had no memory for it (named): as
//   it was, or as it is after the loss.
//   Unavailable: it failed. DeadlineExceeded: it was not ready to move in time, and that was called off; or it is
//   moving.
absl::StatusOr<std::shared_ptr<Job>> ReshardJob(Client& client, const std::string& name, const MeshSpec& mesh,
                                                const ReshardOptions& options = {});

}  // namespace shardmesh
