// `shardctl support`: the table of what a job may have where (core/job/support_table.h). It needs no service.
#pragma once

#include <CLI/App.hpp>
#include <string>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddSupportCommand(CLI::App& app, CommandResult& result);

// For people: features and topologies, pairs of features that exclude each other, limits. docs/support.md shows it.
std::string SupportTables();

// {topologies, features: [{feature, cells: [{topology, supported, test}]}], refused_pairs, limits}.
nlohmann::ordered_json SupportToJson();

}  // namespace shardmesh
