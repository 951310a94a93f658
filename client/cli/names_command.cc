#include "client/cli/names_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/names.h"

namespace shardmesh {
namespace {

struct Flags {
  std::string name;
  std::vector<std::string> root_wrappers, wrapped_at, literal;
  bool json = false;
};

void RunCanonical(const Flags& flags, CommandResult& result) {
  NameRules rules;
  rules.root_wrappers = flags.root_wrappers;
  rules.wrapped_at.insert(flags.wrapped_at.begin(), flags.wrapped_at.end());
  rules.literal.insert(flags.literal.begin(), flags.literal.end());
  const auto canonical = Canonical(flags.name, rules);
  if (!canonical.ok()) return Fail(canonical.status(), result);
  result.out = flags.json ? JsonLine({{"raw", flags.name}, {"canonical", *canonical}}) : absl::StrCat(*canonical, "\n");
}

// An option that takes one value each time it is given.
void AddRepeated(CLI::App& command, const std::string& flag, std::vector<std::string>& values,
                 const std::string& help) {
  command.add_option(flag, values, help)->allow_extra_args(false);
}

}  // namespace

void AddNamesCommand(CLI::App& app, CommandResult& result) {
  CLI::App* names = app.add_subcommand("names", "The rules that turn raw tensor names into canonical ones");
  names->require_subcommand(1);
  names->footer(
      "Examples:\n"
      "  shardctl names canonical _orig_mod.layers.0.w        # layers.0.w\n"
      "  shardctl names canonical --help");
  CLI::App* command = names->add_subcommand("canonical", "Print the canonical name of a raw one");
  const auto flags = std::make_shared<Flags>();
  command->add_option("name", flags->name, "Raw name, as a wrapped model gives it")->required();
  AddRepeated(*command, "--root-wrapper", flags->root_wrappers,
              "Wrapper segment at the head of the name; repeat it, outermost first");
  AddRepeated(*command, "--wrapped-at", flags->wrapped_at,
              "Prefix, as given, behind which one `module` is a data-parallel wrapper; may be repeated");
  AddRepeated(*command, "--literal", flags->literal,
              "Prefix, as given, whose last segment is a module of yours and is kept; may be repeated");
  command->add_flag("--json", flags->json, "Print {raw, canonical} as JSON");
  command->footer(
      "Examples:\n"
      "  shardctl names canonical _orig_mod.layers.0._orig_module.w        # layers.0._orig_module.w\n"
      "  shardctl names canonical --root-wrapper module module.head.w      # head.w\n"
      "  shardctl names canonical --wrapped-at enc enc.module.w            # enc.w\n"
      "  shardctl names canonical --literal a._orig_mod a._orig_mod.w      # a._orig_mod.w");
  command->callback([flags, &result] { RunCanonical(*flags, result); });
}

}  // namespace shardmesh
