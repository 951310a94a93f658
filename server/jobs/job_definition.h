// JobDefinition: what of a job never changes: its specification with canonical names, its plan, its names' indices.
// Immutable, so shared between threads without a lock. Making one is the costly part of CreateJob and needs no state.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "core/job/support.h"
#include "core/mesh/mesh_spec.h"
#include "core/names/names.h"
#include "proto/shardmesh/v1/job.pb.h"

namespace shardmesh {

class JobDefinition {
 public:
  // Errors as JobSpec::Validate(). `spec` is complete and has canonical names.
  static absl::StatusOr<std::shared_ptr<const JobDefinition>> Create(JobSpec spec);
  // The same, of a job that every topology takes whatever the table of support says. For bench/coordinator: it measures
  // the coordinator with jobs of more ranks than a worker's control block has room for.
  static absl::StatusOr<std::shared_ptr<const JobDefinition>> CreateUnrefused(JobSpec spec);
  // The inverse of Serialize(). DataLoss: the bytes are no valid specification.
  static absl::StatusOr<std::shared_ptr<const JobDefinition>> Parse(const std::string& bytes);
  std::string Serialize() const { return proto_.SerializeAsString(); }

  const JobSpec& spec() const { return spec_; }
  const v1::JobSpec& proto() const { return proto_; }
  const Plan& plan() const { return plan_; }
  // By TopologyKind: CheckSupported's message; empty: the job can be there.
  using Refusals = std::array<std::string, kNumTopologyKinds>;
  const Refusals& refusals() const { return refusals_; }

  // The index of a canonical name in spec().parameters; -1 when there is none.
  int IndexOf(absl::string_view canonical) const;
  // The index of the parameter that owns the storage of `index`.
  int StorageOf(int index) const { return storage_of_[index]; }

 private:
  JobDefinition(JobSpec spec, Plan plan, Refusals refusals);

  const JobSpec spec_;
  const Plan plan_;
  const v1::JobSpec proto_;
  const Refusals refusals_;
  absl::flat_hash_map<std::string, int> index_of_;
  std::vector<int> storage_of_;
};

// The same job on another mesh. Errors as JobSpec::Validate().
absl::StatusOr<std::shared_ptr<const JobDefinition>> WithMesh(const std::shared_ptr<const JobDefinition>& job,
                                                              const MeshSpec& mesh);

// A job as a client gives it, with names as the client has them, becomes a definition: canonical names by `rules`, and
// `default_mesh` where the specification has none. A tie that has the canonical name of its owner is dropped.
//   InvalidArgument, ResourceExhausted: as ValidateNameRules, Canonical and JobSpec::Validate; no mesh and no default.
//   AlreadyExists: two names collide; both are named.
//   Unimplemented: no topology supports all that the job needs (core/job/support.h). What it needs is known here; where
//   it will be is not, since workers come and go. So a job that some topology supports is not refused for the workers
//   that live now: it waits for others, and says why (server/seats/assignment.h).
absl::StatusOr<std::shared_ptr<const JobDefinition>> DefineJob(JobSpec given, const NameRules& rules,
                                                               const MeshSpec& default_mesh);

// The mesh of a job that had `wished` elsewhere, where the host with the most live workers has `live` of them.
// Whichever is the first that is set and has enough workers: `wished`, if the default has as many ranks or there is
// none; `default_mesh`; `wished`; all the live workers as fsdp. Without any worker `wished`.
MeshSpec FittingMesh(const MeshSpec& wished, const MeshSpec& default_mesh, int64_t live);

struct ResolvedName {
  std::string canonical;
  int tensor = 0;  // of the storage
};

// Names as a client has them, in the order given. InvalidArgument: as Canonical. NotFound: a name that is no parameter;
// the message has both forms, and the parameter whose name is nearest, if one is near.
absl::StatusOr<std::vector<ResolvedName>> ResolveNames(const JobDefinition& job,
                                                       const std::vector<std::string>& raw_names,
                                                       const NameRules& rules);

}  // namespace shardmesh
