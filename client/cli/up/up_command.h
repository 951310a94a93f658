// `shardctl up`: a coordinator and workers on this machine, until it is stopped. Unlike other subcommands it prints
// while it runs, on standard output, one line for each event (text or JSON):
//   started coordinator pid 100
//   started node pid 101
//   started worker-0 pid 102
//   ready 127.0.0.1:7000 workers 1 mesh fsdp=1
//   ended worker-0 pid 102 signal KILL
//   started worker-0 pid 110
#pragma once

#include <CLI/App.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/base/command.h"

namespace shardmesh {

void AddUpCommand(CLI::App& app, CommandResult& result);

// The path of a program of this product. With `bin_dir`: there, or in its subfolder `folder`; without: beside this
// program, in ../../`folder` from it (a build's output tree), or on PATH. NotFound: nowhere.
absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& folder, const std::string& bin_dir);

}  // namespace shardmesh
