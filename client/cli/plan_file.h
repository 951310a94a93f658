// `shardctl plan --spec FILE`: the layout of a model and a mesh that a file describes (client/cli/layout_spec.h).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "core/bucket_layout.h"

namespace shardmesh {

// For people (core/layout_picture.h), or JSON. NotFound: no such file. ResourceExhausted: more than 256 MiB. Others:
// as ParseLayoutSpec and BucketLayout::Create, with the file's name.
absl::StatusOr<std::string> PlanFile(const std::string& path, bool json);

// {hash, shards, padding: {kind: {elements, padding}}, buckets, placements}.
nlohmann::ordered_json LayoutToJson(const BucketLayout& layout);

}  // namespace shardmesh
