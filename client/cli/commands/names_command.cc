#include "client/cli/commands/names_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "client/cli/files/text_file.h"
#include "core/base/status.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

struct JobFlags {
  ConnectionFlags connection;
  std::string job;
};

struct Flags {
  std::string name;  // or a file of them
  std::vector<std::string> root_wrappers, wrapped_at, literal;
  bool json = false;
};

NameRules RulesOf(const Flags& flags) {
  NameRules rules;
  rules.root_wrappers = flags.root_wrappers;
  rules.wrapped_at.insert(flags.wrapped_at.begin(), flags.wrapped_at.end());
  rules.literal.insert(flags.literal.begin(), flags.literal.end());
  return rules;
}

void RunCanonical(const Flags& flags, CommandResult& result) {
  const auto canonical = Canonical(flags.name, RulesOf(flags));
  if (!canonical.ok()) return Fail(canonical.status(), result);
  result.out = flags.json ? JsonLine({{"raw", flags.name}, {"canonical", *canonical}}) : absl::StrCat(*canonical, "\n");
}

// One line for each raw name: {raw, canonical, storage}.
absl::StatusOr<std::string> TableOfFile(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(flags.name));
  AliasTable names(RulesOf(flags));
  std::vector<std::string> raw_names;
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const absl::string_view kept = absl::StripSuffix(line, "\r");
    if (kept.empty()) continue;
    const std::pair<absl::string_view, absl::string_view> sides = absl::StrSplit(kept, absl::MaxSplits('\t', 1));
    const bool tied = !sides.second.empty();
    const absl::StatusOr<std::string> added = tied ? names.Add(sides.first, sides.second) : names.Add(sides.first);
    if (!added.ok()) return Annotate(added.status(), absl::StrCat(flags.name, " line ", number));
    raw_names.emplace_back(sides.first);
  }
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  Table table({"raw", "canonical", "stored as"});
  for (const std::string& raw : raw_names) {
    ASSIGN_OR_RETURN(const std::string canonical, names.CanonicalOf(raw));
    ASSIGN_OR_RETURN(const std::string storage, names.StorageOf(canonical));
    if (flags.json) list.push_back({{"raw", raw}, {"canonical", canonical}, {"storage", storage}});
    if (!flags.json) table.AddRow({raw, canonical, storage});
  }
  if (flags.json) return JsonLine({{"names", std::move(list)}, {"storages", names.Storages()}});
  return absl::StrCat(table.ToString(), raw_names.size(), " names, ", names.Storages().size(), " tensors stored\n");
}

// An option that takes one value each time it is given.
void AddRepeated(CLI::App& command, const std::string& flag, std::vector<std::string>& values,
                 const std::string& help) {
  command.add_option(flag, values, help)->allow_extra_args(false);
}

void AddRules(CLI::App& command, Flags& flags) {
  AddRepeated(command, "--root-wrapper", flags.root_wrappers,
              "Wrapper segment at the head of the name; repeat it, outermost first");
  AddRepeated(command, "--wrapped-at", flags.wrapped_at,
              "Prefix, as given, behind which one `module` is a data-parallel wrapper; may be repeated");
  AddRepeated(command, "--literal", flags.literal,
              "Prefix, as given, whose last segment is a module of yours and is kept; may be repeated");
}

void AddTable(CLI::App& names, CommandResult& result) {
  CLI::App* command = names.add_subcommand("table", "Translate a file of raw names, and say which two collide");
  const auto flags = std::make_shared<Flags>();
  command
      ->add_option("file", flags->name, "A raw name a line; behind a tab, the name it is tied to. - is standard input")
      ->required();
  AddRules(*command, *flags);
  command->add_flag("--json", flags->json, "Print {names: [{raw, canonical, storage}], storages} as JSON");
  command->footer(
      "Examples:\n"
      "  shardctl names table names.txt\n"
      "  printf 'embed.w\\nhead.w\\tembed.w\\n' | shardctl names table - --json");
  command->callback([flags, &result] { Finish(TableOfFile(*flags), result); });
}

// One line for each parameter of a job: {canonical, original, tied_to}.
absl::StatusOr<std::string> NamesOfJob(const JobFlags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const v1::JobDescription job, DescribeJob(client, flags.job, flags.connection));
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  Table table({"canonical", "original", "tied to"});
  for (const v1::Parameter& p : job.spec().parameters()) {
    const std::string& original = p.given().empty() ? p.name() : p.given();
    if (flags.connection.json)
      list.push_back({{"canonical", p.name()}, {"original", original}, {"tied_to", p.tied_to()}});
    if (!flags.connection.json) table.AddRow({p.name(), original, p.tied_to().empty() ? "-" : p.tied_to()});
  }
  return flags.connection.json ? JsonLine({{"job", flags.job}, {"names", std::move(list)}}) : table.ToString();
}

void AddJobNames(CLI::App& names, CommandResult& result) {
  CLI::App* command = names.add_subcommand("job", "A job's parameters: canonical names, and those it was first given");
  const auto flags = std::make_shared<JobFlags>();
  AddJobArgument(*command, flags->job)->required();
  AddConnectionOptions(*command, flags->connection);
  command->footer("Example:\n  shardctl names job llama");
  command->callback([flags, &result] { Finish(NamesOfJob(*flags), result); });
}

}  // namespace

void AddNamesCommand(CLI::App& app, CommandResult& result) {
  CLI::App* names = app.add_subcommand("names", "The rules that turn raw tensor names into canonical ones");
  names->require_subcommand(1);
  names->footer(
      "Examples:\n"
      "  shardctl names canonical _orig_mod.layers.0.w        # layers.0.w\n"
      "  shardctl names table names.txt                       # a whole model, with its ties\n"
      "  shardctl names job llama                             # of a job, with the names that it was given\n"
      "  shardctl names canonical --help");
  CLI::App* command = names->add_subcommand("canonical", "Print the canonical name of a raw one");
  const auto flags = std::make_shared<Flags>();
  command->add_option("name", flags->name, "Raw name, as a wrapped model gives it")->required();
  AddRules(*command, *flags);
  command->add_flag("--json", flags->json, "Print {raw, canonical} as JSON");
  command->footer(
      "Examples:\n"
      "  shardctl names canonical _orig_mod.layers.0._orig_module.w        # layers.0._orig_module.w\n"
      "  shardctl names canonical --root-wrapper module module.head.w      # head.w\n"
      "  shardctl names canonical --wrapped-at enc enc.module.w            # enc.w\n"
      "  shardctl names canonical --literal a._orig_mod a._orig_mod.w      # a._orig_mod.w");
  command->callback([flags, &result] { RunCanonical(*flags, result); });
  AddTable(*names, result);
  AddJobNames(*names, result);
}

}  // namespace shardmesh
