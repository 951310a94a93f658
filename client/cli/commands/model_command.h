// `shardctl import MODEL` and `shardctl export JOB FOLDER`: a model of safetensors files becomes a job, and a version
// becomes one.
#pragma once

#include <CLI/App.hpp>

#include "client/cli/base/command.h"

namespace shardmesh {

void AddImportCommand(CLI::App& app, CommandResult& result);
void AddExportCommand(CLI::App& app, CommandResult& result);

}  // namespace shardmesh
