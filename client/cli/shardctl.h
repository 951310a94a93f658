// shardctl as a function: what main() calls, and what tests call in their own process.
#pragma once

#include <string>
#include <vector>

#include "client/cli/command.h"

namespace shardmesh {

// Runs one command line, without the program's name. Never throws and never ends the process.
CommandResult RunShardctl(const std::vector<std::string>& args);

}  // namespace shardmesh
