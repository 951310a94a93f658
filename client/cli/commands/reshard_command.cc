#include "client/cli/commands/reshard_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/progress.h"
#include "client/cpp/checkpoint/reshard.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

struct Flags {
  ConnectionFlags connection;
  std::string job, mesh;
};

absl::StatusOr<std::string> Reshard(const Flags& flags) {
  ASSIGN_OR_RETURN(const MeshSpec mesh, ParseMeshSpec(flags.mesh));
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ReshardOptions options;
  options.timeout = flags.connection.timeout();
  absl::StatusOr<std::shared_ptr<Job>> job;
  {
    Progress progress("preparing workers");
    options.progress = [&](int prepared, int all) { progress.ShowCount(prepared, all); };
    job = ReshardJob(client, flags.job, mesh, options);
  }
  RETURN_IF_ERROR(job.status());
  const std::string now = (*job)->spec().mesh.ToString();
  const int64_t epoch = (*job)->epoch().value();
  const int workers = static_cast<int>((*job)->members().size());
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job}, {"mesh", now}, {"epoch", epoch}, {"workers", workers}});
  }
  return absl::StrCat("job ", flags.job, " is on mesh ", now, ", ", workers, " workers, epoch ", epoch, "\n");
}

}  // namespace

void AddReshardCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command =
      app.add_subcommand("reshard", "Bring a job to another mesh, of more or fewer workers, while it trains");
  const auto flags = std::make_shared<Flags>();
  flags->connection.timeout_seconds = 600;
  AddJobArgument(*command, flags->job)->required();
  command->add_option("--mesh", flags->mesh, "Where it is to go on, such as ddp=2,fsdp=4")
      ->required()
      ->type_name("MESH");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Workers of the job's host take part: first its own, then those that serve the fewest jobs. While they build "
      "their\n"
      "memory the job trains on; then weights and states move as they are stored, and it goes on with the same bits.\n"
      "Trainers see UNAVAILABLE once and open the job again. If a worker ends before that, the job stays as it is.\n"
      "The mesh that it has calls off a way to another one.\n"
      "Examples:\n"
      "  shardctl reshard llama --mesh fsdp=4\n"
      "  shardctl reshard llama --mesh ddp=2,fsdp=2 --json");
  command->callback([flags, &result] { Finish(Reshard(*flags), result); });
}

}  // namespace shardmesh
