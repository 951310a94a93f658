// LayoutSpec: a model and a mesh in JSON, for planning before there is a job.
//
//   {"mesh": "ddp=2,fsdp=4",                       as core/mesh/mesh_spec.h reads it
//    "bucket_elements": 16777216,                  optional, as LayoutOptions
//    "tensors": [{"name": "embed.w", "shape": [1000, 64],
//                 "format": "bf16",                optional: tensors of different formats share no bucket; unset: fp32
//                 "granule": "rows:1",             optional, as core/layout/granule.h reads it; unset: flat:256
//                 "tied_to": "head.w"}]}           optional
// Pure and thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/layout/bucket_layout.h"
#include "core/layout/stored_plan.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {

struct LayoutSpec {
  MeshSpec mesh;
  std::vector<LayoutTensor> tensors;
  LayoutOptions options;  // but num_shards, which is the mesh's
};

// InvalidArgument: no JSON (with the byte where it ends to be), a key that is unknown, missing or there twice, or a
// value of another type, with its place ("tensors[3].shape[0]"); or what ParseMeshSpec and ParseGranule refuse. Names
// and sizes are for PlanOf to check.
absl::StatusOr<LayoutSpec> ParseLayoutSpec(absl::string_view json);

// Its layout on the ranks of its mesh. Errors as Mesh::Create and StoredPlan::Create.
absl::StatusOr<StoredPlan> PlanOf(LayoutSpec spec);

}  // namespace shardmesh
