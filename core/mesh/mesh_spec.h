// MeshSpec: a job's mesh as people write it ("ddp=2,fsdp=4"): an ordered list of named dimensions, each with a role.
// The first dimension varies slowest: rank = ((i0 * size1) + i1) * size2 + i2 ...
// A plain value; functions here are pure and thread-safe. Which ranks meet along which dimension: core/mesh/mesh.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

inline constexpr int kMaxMeshDims = 8;
inline constexpr int64_t kMaxMeshRanks = int64_t{1} << 20;
inline constexpr int kMaxDimNameBytes = 64;

// What lies along a dimension of a job's mesh.
enum class DimRole {
  kReplicate,  // every rank along it holds the same shard; their states are replicas of each other
  kShard,      // every rank along it holds another part of the flat space
};

// "replicate" or "shard".
absl::string_view DimRoleName(DimRole role);

// The inverse of DimRoleName. InvalidArgument: any other text.
absl::StatusOr<DimRole> ParseDimRole(absl::string_view text);

// The role that a name has when none is written: `ddp`, `dp_replicate` and `replicate` replicate, all others shard.
DimRole DefaultDimRole(absl::string_view name);

// InvalidArgument unless `name` is a letter or "_", then letters, digits or "_", at most kMaxDimNameBytes in all.
absl::Status ValidateDimName(absl::string_view name);

struct MeshDim {
  std::string name;
  int64_t size = 1;  // ranks along this dimension, >= 1
  DimRole role = DimRole::kShard;

  friend bool operator==(const MeshDim& a, const MeshDim& b) {
    return a.name == b.name && a.size == b.size && a.role == b.role;
  }
  friend bool operator!=(const MeshDim& a, const MeshDim& b) { return !(a == b); }
};

struct MeshSpec {
  std::vector<MeshDim> dims;  // slowest first

  // InvalidArgument: no dimension, a bad or repeated name, a size below 1, or an unknown role value.
  // ResourceExhausted: more than kMaxMeshDims dimensions or more than kMaxMeshRanks ranks.
  absl::Status Validate() const;

  // REQUIRES: Validate() is OK. The product of all sizes, and of the sizes of one role (1 when it has none).
  int64_t NumRanks() const;
  int64_t NumRanks(DimRole role) const;

  // "ddp=2,fsdp=4"; a role that is not the default of its name is written out ("x:replicate=2").
  // ParseMeshSpec(ToString()) gives back any valid spec.
  std::string ToString() const;

  friend bool operator==(const MeshSpec& a, const MeshSpec& b) { return a.dims == b.dims; }
  friend bool operator!=(const MeshSpec& a, const MeshSpec& b) { return !(a == b); }
};

// Parses "name=size,name:role=size,...", no spaces, and validates. Errors as Validate(), and InvalidArgument with the
// offending part when the text has another form.
absl::StatusOr<MeshSpec> ParseMeshSpec(absl::string_view text);

}  // namespace shardmesh
