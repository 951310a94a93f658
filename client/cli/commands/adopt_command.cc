#include "client/cli/commands/adopt_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "checkpoint/adopt.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

struct Flags {
  std::string folder, root;
  bool json = false;
};

absl::StatusOr<std::string> Adopt(const Flags& flags) {
  ASSIGN_OR_RETURN(const AdoptedCheckpoint adopted, AdoptFiles(flags.folder, flags.root));
  const std::string digest = absl::StrFormat("%016x", adopted.digest);
  if (flags.json) {
    return JsonLine({{"job", adopted.job},
                     {"step", adopted.step},
                     {"path", adopted.path},
                     {"bytes", adopted.bytes},
                     {"digest", digest}});
  }
  return absl::StrCat("job ", adopted.job, " at step ", adopted.step, ": ", adopted.path, ", digest ", digest, "\n");
}

}  // namespace

void AddAdoptCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("adopt", "Make a checkpoint of what another program stored");
  const auto flags = std::make_shared<Flags>();
  command->add_option("folder", flags->folder, "Has job.json, model.safetensors, and states/model.safetensors")
      ->required();
  command->add_option("root", flags->root, "The folder of checkpoints that it goes to; made if its parent is there")
      ->required();
  command->add_flag("--json", flags->json, "One JSON object instead of a line");
  command->footer(
      "FOLDER/job.json is {\"step\": N, \"job\": the job's specification as JSON}. The tensors are those of a\n"
      "checkpoint's files, in any order: NAME; NAME.exp_avg, ... as the job stores them, with their scales.\n"
      "shardmesh.checkpoint.adopt_dcp of the Python package writes them, from torch.distributed.checkpoint.\n"
      "Example:\n"
      "  shardctl adopt stored /data/llama && shardctl restore /data/llama --mesh fsdp=4");
  command->callback([flags, &result] { Finish(Adopt(*flags), result); });
}

}  // namespace shardmesh
