// shardctl leases | publish | watch: who keeps which versions, publishing one now, and seeing them come.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddLeasesCommand(CLI::App& app, CommandResult& result);
void AddPublishCommand(CLI::App& app, CommandResult& result);
void AddWatchCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
