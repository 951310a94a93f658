// `shardctl status [JOB]`: what every worker says of itself: steps, versions, and each term of its memory.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddStatusCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
