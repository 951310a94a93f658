// `shardctl jobs [JOB]`: the jobs of a service, or one of them with its members.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddJobsCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
