// `shardctl reshard JOB --mesh MESH`: brings a job to another mesh while it trains.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddReshardCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
