// What the command lines of all benchmarks have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmesh::bench {

struct CommonFlags {
  int rounds = 9;
  bool quick = false;
  std::string json;
};

// --rounds, --quick (`quick`: what it does) and --json. `flags` outlives the parsing.
void AddCommonFlags(CLI::App& app, const std::string& quick, CommonFlags& flags);

// What main returns for `status`; says on standard error what went wrong in bench/`name`.
int ExitStatus(absl::string_view name, const absl::Status& status);

}  // namespace shardmesh::bench
