#include "bench/harness/flags.h"

#include <cstdio>

namespace shardmesh::bench {

void AddCommonFlags(CLI::App& app, const std::string& quick, CommonFlags& flags) {
  app.add_option("--rounds", flags.rounds, "measured rounds")->capture_default_str()->check(CLI::Range(7, 1000));
  app.add_flag("--quick", flags.quick, quick);
  app.add_option("--json", flags.json, "write the rows to this file, too");
}

int ExitStatus(absl::string_view name, const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench/%s: %s\n", std::string(name).c_str(), std::string(status.message()).c_str());
  return 1;
}

}  // namespace shardmesh::bench
