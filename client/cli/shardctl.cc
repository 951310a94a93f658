#include "client/cli/shardctl.h"

#include <CLI/CLI.hpp>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands/adopt_command.h"
#include "client/cli/commands/checkpoint_command.h"
#include "client/cli/commands/jobs_command.h"
#include "client/cli/commands/lease_command.h"
#include "client/cli/commands/mesh_command.h"
#include "client/cli/commands/model_command.h"
#include "client/cli/commands/names_command.h"
#include "client/cli/commands/pull_command.h"
#include "client/cli/commands/reshard_command.h"
#include "client/cli/commands/status_command.h"
#include "client/cli/commands/support_command.h"
#include "client/cli/commands/trace_command.h"
#include "client/cli/commands/versions_command.h"
#include "client/cli/plan/plan_command.h"
#include "client/cli/top/top_command.h"
#include "client/cli/up/up_command.h"
#include "core/base/decimal_flags.h"

namespace shardmesh {
namespace {

// CLI11 only says that a subcommand is missing, also where there is one that it does not know.
std::string Explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  const std::vector<const CLI::App*> commands = at->get_subcommands([](const CLI::App*) { return true; });
  if (commands.empty() || dynamic_cast<const CLI::RequiredError*>(&error) == nullptr) return error.what();
  const std::string known =
      absl::StrJoin(commands, ", ", [](std::string* out, const CLI::App* c) { absl::StrAppend(out, c->get_name()); });
  const std::vector<std::string> words = at->remaining();
  if (words.empty()) return absl::StrCat("a command is required: one of ", known);
  return absl::StrCat("no command \"", absl::CHexEscape(words[0]), "\"; it is one of ", known);
}

}  // namespace

CommandResult RunShardctl(const std::vector<std::string>& args,
                          const std::function<void(CLI::App&, CommandResult&)>& add_more) {
  CommandResult result;
  CLI::App app("shardctl: look at and steer a shardmesh service", "shardctl");
  app.require_subcommand(1);
  app.set_version_flag("--version", "shardmesh 0.1.0");
  app.footer(
      "Exit codes: 0 done, 1 the command failed, 2 the command line is wrong.\n"
      "Every command has --help with examples.\n"
      "Examples:\n"
      "  shardctl up --workers 4 --mesh ddp=2,fsdp=2\n"
      "  shardctl jobs\n"
      "  shardctl pull llama --output llama.safetensors");
  AddUpCommand(app, result);
  AddJobsCommand(app, result);
  AddStatusCommand(app, result);
  AddTopCommand(app, result);
  AddPlanCommand(app, result);
  AddTraceCommand(app, result);
  AddVersionsCommand(app, result);
  AddPullCommand(app, result);
  AddWatchCommand(app, result);
  AddLeasesCommand(app, result);
  AddPublishCommand(app, result);
  AddCheckpointCommand(app, result);
  AddCheckpointsCommand(app, result);
  AddRestoreCommand(app, result);
  AddReshardCommand(app, result);
  AddAdoptCommand(app, result);
  AddImportCommand(app, result);
  AddExportCommand(app, result);
  AddDigestCommand(app, result);
  AddDeleteCommand(app, result);
  AddMeshCommand(app, result);
  AddNamesCommand(app, result);
  AddSupportCommand(app, result);
  if (add_more) add_more(app, result);
  DecimalNumbersOnly(app);
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 takes them last first
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;
    if (app.exit(error, out, err) != 0) {
      FailUsage(Explain(app, error), result);
    } else {
      result.out = out.str();  // of --help and --version
    }
  }
  return result;
}

}  // namespace shardmesh
