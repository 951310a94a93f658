// `shardctl versions JOB`, `shardctl digest JOB`, `shardctl delete JOB`: which versions a job has, one number that says
// whether two runs hold the same bits, and its end.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddVersionsCommand(CLI::App& app, CommandResult& result);
void AddDigestCommand(CLI::App& app, CommandResult& result);
void AddDeleteCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
