// bench/checkpoint: saving a job, loading it on the same mesh and on others, and what saving costs the steps meanwhile:
// against torch.distributed.checkpoint of the same bytes under FSDP2, and against what disk and page cache give.
//
//   bazel run -c opt //bench:checkpoint -- --quick
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/checkpoint/checkpoint_reshard.h"
#include "bench/checkpoint/checkpoint_rounds.h"
#include "bench/checkpoint/disk_speed.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr int kWorkers = 4;  // of the service; a job takes 2 to 4

struct Flags : CommonFlags {
  int layers = 12;
  int vocabulary = 50257;
  std::string python, folder, states;
};

ModelShapes ModelOf(int layers, int64_t vocabulary) {
  ModelShapes all = Gpt2_124M(), model{all.name, {}};
  for (NamedShape& parameter : all.parameters) {
    const std::string prefix = "transformer.h.";
    const bool in_layer = parameter.name.compare(0, prefix.size(), prefix) == 0;
    if (parameter.name == "transformer.wte.weight") parameter.shape[0] = vocabulary;
    if (!in_layer || std::stoi(parameter.name.substr(prefix.size())) < layers) {
      model.parameters.push_back(std::move(parameter));
    }
  }
  return model;
}

// What its ranks make their model of.
absl::Status WriteShapes(const ModelShapes& model, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  for (const NamedShape& parameter : model.parameters) {
    absl::FPrintF(file, "%s %s\n", parameter.name, absl::StrJoin(parameter.shape, "x"));
  }
  std::fclose(file);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Rival>> StartRival(const Flags& flags, const std::string& shapes, Report& report) {
  ASSIGN_OR_RETURN(std::unique_ptr<Rival> rival,
                   Rival::Start(flags.python, {"bench/checkpoint/checkpoint_rivals.py", shapes}));
  ASSIGN_OR_RETURN(const std::string version, rival->Ask("version"));
  report.Note(version + ", gloo, FSDP2; a process of one thread for each rank.");
  return rival;
}

absl::Status Run(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Folder> folder, Folder::Make(flags.folder));
  ASSIGN_OR_RETURN(const std::unique_ptr<DiskSpeed> disk, DiskSpeed::Start(kSavingWorkers, folder->path()));
  const ModelShapes model = ModelOf(flags.layers, flags.vocabulary);
  Report report(absl::StrFormat("bench/checkpoint: GPT-2's tensors with %d layers, %.1f million parameters, AdamW",
                                flags.layers, static_cast<double>(model.NumElements()) / 1e6));
  report.Note(absl::StrCat("Machine at the start: ", MachineNow(), "."));
  const std::string shapes = folder->path() + "/shapes";
  RETURN_IF_ERROR(WriteShapes(model, shapes));
  absl::StatusOr<std::unique_ptr<Rival>> rival = StartRival(flags, shapes, report);
  CheckpointSides sides;
  sides.folder = folder->path();
  sides.disk = disk.get();
  if (rival.ok()) sides.rival = rival->get();
  if (!rival.ok()) {
    sides.missing = absl::StrCat(rival.status().message(), "; tools/parity_env.sh makes an environment with torch");
    absl::FPrintF(stdout, "torch is skipped: %s\n", sides.missing);
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Service> service,
                   Service::Start(folder->path(), "127.0.0.1:0", Process::kEveryCore, absl::ZeroDuration(), kWorkers));
  RETURN_IF_ERROR(AddReshards(*service, sides, report));
  CheckpointRounds fp32(model, StateFormat::kFp32, "adamw", flags.quick ? 3 : flags.rounds, flags.quick);
  if (flags.states != "dyn8") RETURN_IF_ERROR(Annotate(fp32.Run(*service, sides, report), "fp32 states"));
  CheckpointRounds dyn8(model, StateFormat::kDyn8, "adamw8bit", flags.quick ? 3 : flags.rounds, flags.quick);
  const bool with_dyn8 = flags.states.empty() ? !flags.quick : flags.states == "dyn8";
  if (with_dyn8) RETURN_IF_ERROR(Annotate(dyn8.Run(*service, sides, report), "8-bit states"));
  report.Note(absl::StrCat("Machine at the end: ", MachineNow(), "."));
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/checkpoint: saving a job, loading it on the same mesh and on others, and what saving costs the steps\n"
      "meanwhile: against torch.distributed.checkpoint of the same bytes under FSDP2, in turns inside one run, and\n"
      "against what disk and page cache give. Checks each time that what was loaded is what was saved."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(
      app, "3 rounds of a fifth of the model, fp32 states alone: about a minute on two cores", flags);
  app.add_option("--layers", flags.layers, "of the model; 12: GPT-2 124M")
      ->capture_default_str()
      ->check(CLI::Range(1, 12));
  app.add_option("--python", flags.python, "a Python with torch; unset: that of tools/parity_env.sh");
  app.add_option("--states", flags.states, "fp32 or dyn8 alone; unset: both")->check(CLI::IsMember({"fp32", "dyn8"}));
  app.add_option("--folder", flags.folder, "where files are written, on a disk; unset: the folder for temporary files");
  app.footer(
      "Examples:\n"
      "  tools/parity_env.sh && bazel run -c opt //bench:checkpoint -- --quick\n"
      "  bazel run -c opt //bench:checkpoint -- --json $PWD/checkpoint.json      20 minutes; 20 GB of memory");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) {
    flags.layers = 2;
    flags.vocabulary = 12565;
  }
  return shardmesh::bench::ExitStatus("checkpoint", shardmesh::bench::Run(flags));
}
