// `shardctl pull JOB`: a whole version, summed up as a table or written as a safetensors file. Unlike other subcommands
// it writes while it runs: a line of progress on standard error, where that is a terminal.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddPullCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
