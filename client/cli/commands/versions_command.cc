#include "client/cli/commands/versions_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

struct Flags {
  ConnectionFlags connection;
  std::string job;
};

using Action = absl::StatusOr<std::string> (*)(Client& client, const Flags& flags);  // gives the output

absl::StatusOr<std::string> Versions(Client& client, const Flags& flags) {
  v1::ListVersionsRequest request;
  request.set_job(flags.job);
  ASSIGN_OR_RETURN(const v1::ListVersionsReply versions,
                   client.coordinator().ListVersions(request, flags.connection.timeout()));
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job},
                     {"committed_step", versions.committed_step()},
                     {"published_steps", StepsToJson(versions.published_steps())},
                     {"epoch", versions.epoch()}});
  }
  Table table({"committed", "published", "epoch"});
  table.AddRow({versions.committed_step() < 0 ? "-" : absl::StrCat(versions.committed_step()),
                StepList(versions.published_steps()), absl::StrCat(versions.epoch())});
  return table.ToString();
}

absl::StatusOr<std::string> Digest(Client& client, const Flags& flags) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(flags.job));
  ASSIGN_OR_RETURN(const v1::DigestReply reply, job->Digest(flags.connection.timeout()));
  const std::string digest = absl::StrFormat("%016x", reply.digest());
  if (flags.connection.json) return JsonLine({{"job", flags.job}, {"step", reply.step()}, {"digest", digest}});
  return absl::StrCat("step ", reply.step(), " digest ", digest, "\n");
}

absl::StatusOr<std::string> Delete(Client& client, const Flags& flags) {
  v1::DeleteJobRequest request;
  request.set_job(flags.job);
  RETURN_IF_ERROR(client.coordinator().DeleteJob(request, flags.connection.timeout()));
  return flags.connection.json ? JsonLine({{"deleted", flags.job}}) : absl::StrCat("deleted ", flags.job, "\n");
}

void Add(CLI::App& app, const std::string& name, const std::string& help, const std::string& footer, Action action,
         CommandResult& result) {
  CLI::App* command = app.add_subcommand(name, help);
  const auto flags = std::make_shared<Flags>();
  AddJobArgument(*command, flags->job)->required();
  AddConnectionOptions(*command, flags->connection);
  command->footer(footer);
  command->callback([flags, action, &result] {
    absl::StatusOr<Client> client = ConnectTo(flags->connection);
    if (!client.ok()) return Fail(client.status(), result);
    Finish(action(*client, *flags), result);
  });
}

}  // namespace

void AddVersionsCommand(CLI::App& app, CommandResult& result) {
  Add(app, "versions", "Show the newest committed step and the versions that can be pulled",
      "Each load, restore, re-form and reshard begins a later epoch, whose versions come before all older ones.\n"
      "As of the last heartbeat that reached the coordinator; ask the workers themselves with `shardctl status`.\n"
      "Examples:\n"
      "  shardctl versions llama\n"
      "  shardctl versions llama --json",
      Versions, result);
}

void AddDigestCommand(CLI::App& app, CommandResult& result) {
  Add(app, "digest", "Print 64 bits over all weights and optimizer state of the committed step",
      "The same job has the same digest at the same step on every mesh.\n"
      "Examples:\n"
      "  shardctl digest llama        # step 120 digest 0123456789abcdef\n"
      "  shardctl digest llama --json",
      Digest, result);
}

void AddDeleteCommand(CLI::App& app, CommandResult& result) {
  Add(app, "delete", "Delete a job and its memory on the workers; there is no way back",
      "Its published versions are gone, too, but for leased ones, which last as long as their leases; `shardctl pull\n"
      "--output` keeps one.\n"
      "Examples:\n"
      "  shardctl delete llama",
      Delete, result);
}

}  // namespace shardmesh
