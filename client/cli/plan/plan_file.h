// `shardctl plan --spec FILE`: the layout of a model and a mesh that a file describes (client/cli/plan/layout_spec.h).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "core/layout/stored_plan.h"

namespace shardmesh {

struct PlanFileOptions {
  std::optional<Rank> rank;  // what this rank holds, in place of the whole plan
  std::string reshard_from;  // another file: what `rank` copies to have its part of this plan
  bool json = false;
};

// For people (core/layout/layout_picture.h, or tables), or JSON. NotFound: no such file or rank. ResourceExhausted:
// more than 256 MiB, or more boxes or copies than are listed. Others: as ParseLayoutSpec, StoredPlan::Create and
// CopiesInto, with the file's name. REQUIRES: a rank when reshard_from is set.
absl::StatusOr<std::string> PlanFile(const std::string& path, const PlanFileOptions& options);

// {hash, mesh, shards, ranks: [those of each shard], padding: {kind: {elements, padding}}, buckets, placements}.
nlohmann::ordered_json PlanToJson(const StoredPlan& plan);

}  // namespace shardmesh
