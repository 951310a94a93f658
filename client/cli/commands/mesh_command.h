// `shardctl mesh`: the algebra of device meshes (core/mesh/mesh.h), as JSON or as a drawing. Works alone, without a
// service.
#pragma once

#include <CLI/App.hpp>
#include <string>

#include "client/cli/base/command.h"
#include "core/mesh/mesh.h"

namespace shardmesh {

void AddMeshCommand(CLI::App& app, CommandResult& result);

// {names, sizes, instances, groups}: instances as nested lists of ranks, groups as lists of ranks for each dimension.
nlohmann::ordered_json MeshToJson(const Mesh& mesh);

}  // namespace shardmesh
