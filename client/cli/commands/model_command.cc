#include "client/cli/commands/model_command.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/progress.h"
#include "client/cpp/checkpoint/model.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

struct ImportFlags {
  ConnectionFlags connection;
  std::string model, name, mesh, weights, states = "fp32", gradients = "bf16", optimizer = "adamw";
  double learning_rate = -1;  // not given
  std::vector<std::string> ties;
  ImportOptions options;
};

struct ExportFlags {
  ConnectionFlags connection;
  std::string job, folder;
  int64_t exact = -1;  // not given
  double file_gigabytes = static_cast<double>(kMaxFileBytes) / 1e9;
  ExportOptions options;
};

// The folder's name, as far as a job can have it.
std::string DefaultName(const std::string& model) {
  std::filesystem::path path = std::filesystem::absolute(model).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  if (path.extension() == ".safetensors" || path.extension() == ".json") path = path.parent_path();
  std::string name = path.filename().string().substr(0, kMaxIdBytes);
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') c = '-';
  }
  return name;
}

absl::Status ReadOptions(const ImportFlags& flags, ImportOptions& options) {
  options.timeout = flags.connection.timeout();
  JobSpec& job = options.job;
  job.name = flags.name.empty() ? DefaultName(flags.model) : flags.name;
  RETURN_IF_ERROR(ValidateId("job name", job.name));
  if (!flags.mesh.empty()) {
    ASSIGN_OR_RETURN(job.mesh, ParseMeshSpec(flags.mesh));
  }
  ASSIGN_OR_RETURN(const OptimizerKind optimizer, ParseOptimizer(flags.optimizer));
  job.optimizer = OptimizerHyper::Defaults(optimizer);
  if (flags.learning_rate >= 0) job.optimizer.lr = flags.learning_rate;
  ASSIGN_OR_RETURN(job.gradient_format, ParseFormat(flags.gradients));
  ASSIGN_OR_RETURN(options.states, ParseStateFormat(flags.states));
  if (!flags.weights.empty()) {
    ASSIGN_OR_RETURN(options.weights, ParseWeightFormat(flags.weights));
  }
  for (const std::string& tie : flags.ties) {
    const std::vector<std::string> names = absl::StrSplit(tie, '=');
    if (names.size() != 2 || names[0].empty() || names[1].empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tie ", tie, "; NAME=OWNER is needed, as lm_head.weight=wte.weight"));
    }
    options.ties[names[0]] = names[1];
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Import(const ImportFlags& flags) {
  ImportOptions options = flags.options;
  RETURN_IF_ERROR(ReadOptions(flags, options));
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  absl::StatusOr<ImportedModel> imported;
  {
    Progress progress("importing");
    options.progress = [&](int64_t done, int64_t total) { progress.Show(done, total); };
    imported = ImportModel(client, flags.model, options);
  }
  RETURN_IF_ERROR(imported.status());
  const JobSpec& spec = imported->job->spec();
  int64_t elements = 0;
  for (const ParameterSpec& parameter : spec.parameters) {
    if (parameter.tied_to.empty()) elements += parameter.NumElements();
  }
  if (flags.connection.json) {
    return JsonLine({{"job", spec.name},
                     {"mesh", spec.mesh.ToString()},
                     {"parameters", spec.parameters.size()},
                     {"elements", elements},
                     {"skipped", imported->skipped}});
  }
  return absl::StrCat(
      "job ", spec.name, " on mesh ", spec.mesh.ToString(), ": ", spec.parameters.size(), " parameters, ", elements,
      " elements\n",
      imported->skipped.empty() ? "" : absl::StrCat("left out: ", absl::StrJoin(imported->skipped, ", "), "\n"));
}

absl::StatusOr<std::string> Export(const ExportFlags& flags) {
  ExportOptions options = flags.options;
  options.timeout = flags.connection.timeout();
  options.max_file_bytes = static_cast<int64_t>(flags.file_gigabytes * 1e9);
  if (flags.exact >= 0) options.version = {VersionChoice::kExact, Step(flags.exact)};
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(flags.job, {}, JobUse::kRead));
  absl::StatusOr<ExportedModel> exported;
  {
    Progress progress("exporting");
    options.progress = [&](int64_t done, int64_t total) { progress.Show(done, total); };
    exported = ExportModel(*job, flags.folder, options);
  }
  RETURN_IF_ERROR(exported.status());
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job},
                     {"step", exported->step},
                     {"folder", flags.folder},
                     {"tensors", exported->tensors},
                     {"bytes", exported->bytes}});
  }
  return absl::StrCat("step ", exported->step, ": ", exported->tensors, " tensors, ", HumanBytes(exported->bytes),
                      " in ", flags.folder, "\n");
}

template <class Flags>
void RunModel(absl::StatusOr<std::string> (*command)(const Flags&), const Flags& flags, CommandResult& result) {
  absl::StatusOr<std::string> out;
  try {
    out = command(flags);
  } catch (const std::bad_alloc&) {
    out = absl::ResourceExhaustedError("the model does not fit into this machine's memory");
  }
  Finish(std::move(out), result);
}

void AddNameRules(CLI::App& command, NameRules& rules, const char* where) {
  command.add_option("--root-wrapper", rules.root_wrappers,
                     absl::StrCat("A wrapper that the names in ", where, " begin with, as module; may be repeated"));
}

}  // namespace

void AddImportCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("import", "Make a job of a model in safetensors files");
  const auto flags = std::make_shared<ImportFlags>();
  flags->connection.timeout_seconds = 600;
  command
      ->add_option("model", flags->model,
                   "A folder with model.safetensors or model.safetensors.index.json, or one such file")
      ->required();
  command->add_option("--name", flags->name, "Of the job; unset: the folder's");
  command->add_option("--mesh", flags->mesh, "As ddp=2,fsdp=2; unset: the coordinator's default");
  command->add_option("--slots", flags->options.job.num_slots, "Gradient slots")->capture_default_str();
  command->add_option("--weights", flags->weights,
                      "Their format, as fp32 or bf16_sr; unset: bf16_sr of BF16, fp32 of F32 and F16");
  command->add_option("--states", flags->states, "Format of optimizer states, as fp32 or dyn8")->capture_default_str();
  command->add_option("--gradients", flags->gradients, "fp32 or bf16")->capture_default_str();
  command->add_option("--optimizer", flags->optimizer, "adamw, adam, sgd, lion or muon")->capture_default_str();
  command->add_option("--lr", flags->learning_rate, "Learning rate; unset: the optimizer's default")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--seed", flags->options.job.seed, "Of stochastic rounding")->capture_default_str();
  command->add_option("--tie", flags->ties, "NAME=OWNER: NAME shares the storage of OWNER; may be repeated");
  AddNameRules(*command, flags->options.rules, "the files");
  command->add_flag("--skip-others", flags->options.skip_others, "Leave out tensors that are not F32, BF16 or F16");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Names become canonical (_orig_mod. and the like are dropped; shardctl names --help). If it fails there is no\n"
      "job.\n"
      "Examples:\n"
      "  shardctl import ~/models/gpt2 --name gpt2 --mesh fsdp=2\n"
      "  shardctl import ~/models/llama --weights bf16_sr --states dyn8 --slots 4\n"
      "  shardctl import run/model.safetensors --root-wrapper module --tie lm_head.weight=wte.weight --json");
  command->callback([flags, &result] { RunModel(Import, *flags, result); });
}

void AddExportCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("export", "Write a version as a model in safetensors files");
  const auto flags = std::make_shared<ExportFlags>();
  flags->connection.timeout_seconds = 600;
  AddJobArgument(*command, flags->job)->required();
  command->add_option("folder", flags->folder, "A folder that is not there yet; it appears whole or not at all")
      ->required();
  command->add_option("--exact", flags->exact, "The version of this step; unset: the newest")
      ->type_name("STEP")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()).description(""));
  CLI::Option* like = command->add_option(
      "--like", flags->options.like,
      "A model whose names, dtypes, other tensors and small files (config.json, ...) the new one has");
  AddNameRules(*command, flags->options.rules, "--like");
  command->add_option("--dtype", flags->options.dtype, "F32, BF16 or F16; unset: as --like, or as the version");
  command->add_flag("--every-name", flags->options.every_name, "Tied parameters under each of their names")
      ->excludes(like);
  command
      ->add_flag("--original-names", flags->options.original_names,
                 "Names as the job was first given them, wrappers and all; shardctl names job JOB lists them")
      ->excludes(like);
  command->add_option("--file-gigabytes", flags->file_gigabytes, "Cut into files of about this size")
      ->capture_default_str()
      ->check(CLI::Range(1e-9, 1e6).description(""));
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Without --like: canonical names, tied parameters once, as loaders expect.\n"
      "Examples:\n"
      "  shardctl export gpt2 out/gpt2-1200 --exact 1200\n"
      "  shardctl export gpt2 out/gpt2 --like ~/models/gpt2      # AutoModel.from_pretrained(\"out/gpt2\")\n"
      "  shardctl export llama out/llama --dtype BF16 --file-gigabytes 2 --json");
  command->callback([flags, &result] { RunModel(Export, *flags, result); });
}

}  // namespace shardmesh
