// `shardctl top [JOB]`: a live view of jobs: how fast they step, what their workers do, and which trainer the others
// wait for. Unlike other subcommands it prints while it runs, on standard output, a block of tables or a line of JSON
// for each refresh. SIGINT and SIGTERM end it, exit code 0; while the coordinator or a worker is silent, after twice
// --timeout at most.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddTopCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
