#include "client/cli/commands/checkpoint_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "checkpoint/folder.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/progress.h"
#include "client/cli/base/table.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/checkpoint/checkpoint_schedule.h"
#include "core/base/status.h"
#include "rpc/base/main_support.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct SaveFlags {
  ConnectionFlags connection;
  std::string job, root;
  KeepRule keep;
  int64_t every = 0;  // steps; 0: one checkpoint, now
  int64_t count = 0;  // with `every`: checkpoints; 0: until it is stopped
};

struct RestoreFlags {
  ConnectionFlags connection;
  std::string path;
  RestoreOptions options;
};

struct ListFlags {
  std::string root;
  bool json = false;
};

std::string Hex(uint64_t digest) { return absl::StrFormat("%016x", digest); }

std::string Line(const SaveFlags& flags, const ScheduledSave& save) {
  const SavedCheckpoint& saved = save.saved;
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job},
                     {"step", saved.step},
                     {"path", saved.path},
                     {"bytes", saved.bytes},
                     {"digest", Hex(saved.digest)},
                     {"already_there", saved.already_there},
                     {"removed_steps", save.removed}});
  }
  return absl::StrCat(
      "step ", saved.step, saved.already_there ? " was saved before: " : ": ", HumanBytes(saved.bytes), " in ",
      saved.path, ", digest ", Hex(saved.digest), "\n",
      save.removed.empty() ? "" : absl::StrCat("removed: steps ", absl::StrJoin(save.removed, ", "), "\n"));
}

void Print(FILE* to, const std::string& text) {
  std::fputs(text.c_str(), to);
  std::fflush(to);
}

void WarnUnlessRecorded(const SavedCheckpoint& saved) {
  if (saved.recorded.ok()) return;
  Print(stderr, absl::StrCat("shardctl: the job would not go back to this checkpoint by itself, since the coordinator "
                             "does not know of it: ",
                             saved.recorded.message(), "\n"));
}

absl::StatusOr<std::string> Save(const SaveFlags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(flags.job));
  SaveOptions options;
  options.timeout = flags.connection.timeout();
  absl::StatusOr<SavedCheckpoint> saved;
  {
    Progress progress("saving");
    options.progress = [&](int64_t done, int64_t total) { progress.Show(done, total); };
    saved = SaveCheckpoint(*job, flags.root, options);
  }
  RETURN_IF_ERROR(saved.status());
  WarnUnlessRecorded(*saved);
  ScheduledSave save{*std::move(saved), {}};
  if (flags.keep.last > 0 && save.saved.recorded.ok()) {
    ASSIGN_OR_RETURN(save.removed, Prune(flags.root, flags.keep));
  }
  return Line(flags, save);
}

// Saves until it is stopped. Lines go out as they come.
absl::StatusOr<std::string> SaveEvery(const SaveFlags& flags) {
  StopSignal stop;
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.OpenJob(flags.job));
  Progress progress("saving");
  SaveScheduleOptions options;
  options.root = flags.root;
  options.keep = flags.keep;
  options.save.timeout = flags.connection.timeout();
  options.save.progress = [&](int64_t done, int64_t total) { progress.Show(done, total); };
  options.schedule.every = flags.every;
  options.schedule.count = flags.count;
  options.schedule.saved = [&](const ScheduledSave& save) {
    WarnUnlessRecorded(save.saved);
    Print(stdout, Line(flags, save));
  };
  options.schedule.troubled = [](const absl::Status& status) {
    Print(stderr, absl::StrCat("shardctl: trying again: ", status.ToString(), "\n"));
  };
  options.stops = [&](absl::Duration after) { return stop.WaitFor(after); };
  RETURN_IF_ERROR(SaveOnSchedule(client, std::move(job), options));
  return std::string();
}

absl::StatusOr<std::string> Restore(const RestoreFlags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  RestoreOptions options = flags.options;
  options.timeout = flags.connection.timeout();
  absl::StatusOr<std::shared_ptr<Job>> job;
  {
    Progress progress("restoring");
    options.progress = [&](int64_t done, int64_t total) { progress.Show(done, total); };
    job = RestoreCheckpoint(client, flags.path, options);
  }
  RETURN_IF_ERROR(job.status());
  ASSIGN_OR_RETURN(const v1::DigestReply digest, (*job)->Digest(flags.connection.timeout()));
  const std::string name = (*job)->spec().name, mesh = (*job)->spec().mesh.ToString();
  if (flags.connection.json) {
    return JsonLine({{"job", name}, {"step", digest.step()}, {"mesh", mesh}, {"digest", Hex(digest.digest())}});
  }
  return absl::StrCat("job ", name, " at step ", digest.step(), " on mesh ", mesh, ", digest ", Hex(digest.digest()),
                      "\n");
}

absl::StatusOr<std::string> List(const ListFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, ListCheckpoints(flags.root));
  Table table({"step", "job", "mesh", "size", "digest", "path"});
  Json list = Json::array();
  for (const FoundCheckpoint& each : found) {
    const absl::StatusOr<OpenedCheckpoint> opened = OpenCheckpoint(each.path);
    if (!opened.ok()) {
      list.push_back({{"step", each.step}, {"path", each.path}, {"error", opened.status().message()}});
      table.AddRow({absl::StrCat(each.step), "-", "-", "-", "damaged", each.path});
      continue;
    }
    const Manifest& manifest = opened->manifest;
    int64_t bytes = 0;
    for (const Manifest::File& file : manifest.files) bytes += file.bytes;
    list.push_back({{"step", each.step},
                    {"job", manifest.spec.name},
                    {"mesh", manifest.spec.mesh.ToString()},
                    {"bytes", bytes},
                    {"digest", Hex(manifest.digest)},
                    {"path", each.path}});
    table.AddRow({absl::StrCat(each.step), manifest.spec.name, manifest.spec.mesh.ToString(), HumanBytes(bytes),
                  Hex(manifest.digest), each.path});
  }
  return flags.json ? JsonLine({{"checkpoints", std::move(list)}}) : table.ToString();
}

}  // namespace

void AddCheckpointCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("checkpoint", "Save a job's weights and states to files, while it trains on");
  const auto flags = std::make_shared<SaveFlags>();
  flags->connection.timeout_seconds = 600;
  AddJobArgument(*command, flags->job)->required();
  command->add_option("root", flags->root, "The folder of the job's checkpoints; made with its parents")
      ->required()
      ->type_name("FOLDER");
  CLI::Option* last =
      command
          ->add_option("--keep-last", flags->keep.last, "Then remove all but the newest N, and those of --keep-every")
          ->check(CLI::Range(1, std::numeric_limits<int>::max()).description(""))
          ->type_name("N");
  command->add_option("--keep-every", flags->keep.every, "Keep those whose step is a multiple of M, too")
      ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""))
      ->needs(last)
      ->type_name("M");
  CLI::Option* every =
      command
          ->add_option("--every", flags->every, "Go on, and save whenever the job passed the next multiple of N steps")
          ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""))
          ->type_name("N");
  command->add_option("--count", flags->count, "End after so many checkpoints; 0: at Ctrl-C")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()).description(""))
      ->needs(every)
      ->type_name("N");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Writes FOLDER/step-STEP: model.safetensors (weights, for any loader), states.safetensors (what a job needs to\n"
      "go on with the same bits) and manifest.json. It is there whole or not at all. The workers write it: they see\n"
      "FOLDER under the same path. The service does not have the model's buffers, such as BatchNorm's statistics:\n"
      "Optimizer.save() of the trainer writes them, too. A step that is saved already stays as it is.\n"
      "With --every it waits for a coordinator or workers that come back, follows a job that goes on with other "
      "workers,\n"
      "and ends when the job is gone or has failed. A save that is under way at Ctrl-C is finished.\n"
      "Examples:\n"
      "  shardctl checkpoint llama /data/llama\n"
      "  shardctl checkpoint llama /data/llama --every 500 --keep-last 3 --keep-every 10000");
  command->callback([flags, &result] { Finish(flags->every > 0 ? SaveEvery(*flags) : Save(*flags), result); });
}

void AddRestoreCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("restore", "Create a job from a checkpoint, on any mesh");
  const auto flags = std::make_shared<RestoreFlags>();
  flags->connection.timeout_seconds = 600;
  command->add_option("path", flags->path, "A checkpoint, or a folder of them: its newest")->required();
  command->add_option("--job", flags->options.name, "The name of the new job; as it was saved")->type_name("NAME");
  command->add_option("--gather", flags->options.gather,
                      "The format in which it gathers weights, such as fp8_tensor; as it was saved");
  command->add_option("--mesh", flags->options.mesh, "Its mesh, such as ddp=2,fsdp=2; as it was saved")
      ->type_name("MESH");
  command->add_flag(
      "--fit-mesh", flags->options.fit_mesh,
      "Without --mesh: if the live workers are too few for the mesh that was saved, one that they can hold");
  command->add_option("--residency", flags->options.residency, "full or bucket; as it was saved")
      ->type_name("RESIDENCY");
  command
      ->add_option("--bucket-elements", flags->options.bucket_elements,
                   "Elements gathered together, about, 1024 to 2^32; 0: as it was saved")
      ->type_name("N");
  command
      ->add_option(
          "--prefetch-buckets", flags->options.prefetch_buckets,
          "With bucket residency: buckets that a trainer may hold beyond the one it works on; 0: as it was saved")
      ->type_name("N");
  command
      ->add_option(
          "--on-loss", flags->options.on_loss,
          "What if it loses a shard of which no copy is left: fail, or checkpoint, to go back to the newest one; "
          "as it was saved")
      ->type_name("WHAT");
  command
      ->add_option("--copies", flags->options.copies,
                   "2: of a job on several hosts, another host keeps each shard, too; 1: none does; 0: as it was saved")
      ->type_name("N");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "The job goes on after the checkpoint's step with the bits that it had, whatever the mesh and the residency.\n"
      "Examples:\n"
      "  shardctl restore /data/llama --fit-mesh\n"
      "  shardctl restore /data/llama --residency bucket\n"
      "  shardctl restore /data/llama/step-0000000001200 --job llama-2 --mesh fsdp=3");
  command->callback([flags, &result] { Finish(Restore(*flags), result); });
}

void AddCheckpointsCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("checkpoints", "List the checkpoints of a folder");
  const auto flags = std::make_shared<ListFlags>();
  command->add_option("root", flags->root, "The folder of a job's checkpoints")->required()->type_name("FOLDER");
  command->add_flag("--json", flags->json, "One JSON object instead of a table");
  command->footer("Example:\n  shardctl checkpoints /data/llama");
  command->callback([flags, &result] { Finish(List(*flags), result); });
}

}  // namespace shardmesh
