// `shardctl names`: what the name rules make of a raw name. Works alone, without a service.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddNamesCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
