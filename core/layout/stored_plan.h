// StoredPlan: a BucketLayout on the ranks of a mesh: which rank holds which shard.
//
// Coordinates along the dimensions that do not replicate number the shards, in mesh order, the first dimension slowest.
// A pure function of its arguments; immutable and thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/layout/bucket_layout.h"
#include "core/layout/layout_reshard.h"
#include "core/mesh/mesh.h"

namespace shardmesh {

// What one shard holds of a tensor.
struct StoredPart {
  int64_t shard = 0;
  Stretch stretch;
};

class StoredPlan {
 public:
  // `replicate`: the dimensions of the mesh along which every rank holds the same. options.num_shards is set here.
  // Errors as BucketLayout::Create. NotFound: `replicate` names no dimension of the mesh. InvalidArgument: one twice.
  static absl::StatusOr<StoredPlan> Create(std::vector<LayoutTensor> tensors, LayoutOptions options, const Mesh& mesh,
                                           const std::vector<std::string>& replicate);

  const BucketLayout& layout() const { return layout_; }
  const Mesh& mesh() const { return mesh_; }
  const std::vector<std::string>& replicate() const { return replicate_; }
  const std::string& hash() const { return hash_; }  // 32 hexadecimal digits: the layout, and which rank holds what

  // The ranks that hold a shard, by instance of the mesh, then replica. REQUIRES: 0 <= shard < num_shards.
  std::vector<Rank> RanksOf(int64_t shard) const;

  // The shard that a rank holds. NotFound: it is not in the mesh.
  absl::StatusOr<int64_t> ShardOf(Rank rank) const;

  // Where a tensor lies, ascending; empty when it has no elements. NotFound: no such name.
  absl::StatusOr<std::vector<StoredPart>> PartsOf(absl::string_view name) const;

 private:
  StoredPlan(BucketLayout layout, Mesh mesh, std::vector<std::string> replicate, Mesh by_replica);

  BucketLayout layout_;
  Mesh mesh_;
  std::vector<std::string> replicate_;
  Mesh by_replica_;                           // the same mesh, the dimensions that replicate first
  std::vector<std::vector<Rank>> instances_;  // of by_replica_
  std::string hash_;
};

// A copy, from the rank that makes it possible.
struct RankCopy {
  Rank source;
  ShardCopy copy;
};

// What `rank` of `to` copies from the ranks of `from`: from itself where it has the source, else from the replica whose
// turn it is. NotFound: no such rank. Others as CopiesInto (core/layout/layout_reshard.h).
absl::StatusOr<std::vector<RankCopy>> CopiesOf(const StoredPlan& from, const StoredPlan& to, Rank rank);

}  // namespace shardmesh
