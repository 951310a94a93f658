#include "client/cli/shardctl.h"

#include <CLI/CLI.hpp>
#include <sstream>

#include "client/cli/jobs_command.h"
#include "client/cli/mesh_command.h"
#include "client/cli/names_command.h"
#include "client/cli/plan_command.h"
#include "client/cli/pull_command.h"
#include "client/cli/status_command.h"
#include "client/cli/up_command.h"
#include "client/cli/versions_command.h"

namespace shardmesh {

CommandResult RunShardctl(const std::vector<std::string>& args) {
  CommandResult result;
  CLI::App app("shardctl: look at and steer a shardmesh service", "shardctl");
  app.require_subcommand(1);
  app.set_version_flag("--version", "shardmesh 0.1.0");
  app.footer("Exit codes: 0 done, 1 the command failed, 2 the command line is wrong.");
  AddUpCommand(app, result);
  AddJobsCommand(app, result);
  AddStatusCommand(app, result);
  AddPlanCommand(app, result);
  AddVersionsCommand(app, result);
  AddPullCommand(app, result);
  AddDigestCommand(app, result);
  AddDeleteCommand(app, result);
  AddMeshCommand(app, result);
  AddNamesCommand(app, result);
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 takes them last first
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;
    const bool usage = app.exit(error, out, err) != 0;
    result = {out.str(), err.str(), usage ? kExitUsage : kExitOk};
  }
  return result;
}

}  // namespace shardmesh
