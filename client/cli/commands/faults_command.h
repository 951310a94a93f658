// `shardctl faults`: the fault points (core/base/fault_point.h) that a faulty worker can come to harm at. Programs of
// tests alone have it: nothing of the product can.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddFaultsCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
