// `shardctl adopt FOLDER ROOT`: a checkpoint of the weights and optimizer states that another program stored.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddAdoptCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
