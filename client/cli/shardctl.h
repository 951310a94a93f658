// shardctl as a function: what main() calls, and what tests call in their own process.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "client/cli/base/command.h"

namespace CLI {
class App;
}  // namespace CLI

namespace shardmesh {

// Runs one command line, without the program's name. Never throws and never ends the process. `add_more`: adds
// subcommands that the product does not have.
CommandResult RunShardctl(const std::vector<std::string>& args,
                          const std::function<void(CLI::App&, CommandResult&)>& add_more = {});

}  // namespace shardmesh
