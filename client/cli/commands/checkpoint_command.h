// `shardctl checkpoint JOB ROOT`, `shardctl restore PATH` and `shardctl checkpoints ROOT`: a job's weights and states
// to files and back, on any mesh.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddCheckpointCommand(CLI::App& app, CommandResult& result);
void AddRestoreCommand(CLI::App& app, CommandResult& result);
void AddCheckpointsCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
