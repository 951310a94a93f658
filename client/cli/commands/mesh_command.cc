#include "client/cli/commands/mesh_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/cli/commands/lists.h"
#include "client/cli/commands/mesh_changes.h"
#include "core/base/ids.h"
#include "core/mesh/mesh_picture.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  std::string shape, names;
  std::optional<std::string> ranks;
  std::vector<std::vector<std::string>> changes{MeshOptions().size()};  // the texts of each option, in their order
  bool json = false;
};

std::string BadList(absl::string_view flag, absl::string_view value, absl::string_view example, int bits) {
  return absl::StrCat(flag, " \"", absl::CHexEscape(value), "\" is not a list of whole numbers below 2^", bits,
                      "; write it like ", example);
}

absl::StatusOr<Mesh> ApplyAll(absl::StatusOr<Mesh> mesh, const std::vector<MeshChange>& changes) {
  for (size_t i = 0; mesh.ok() && i < changes.size(); ++i) mesh = changes[i](*mesh);
  return mesh;
}

void RunMesh(const Flags& flags, const std::vector<MeshChange>& changes, CommandResult& result) {
  const auto shape = ParseNumbers<int64_t>(flags.shape);
  if (!shape.has_value()) return FailUsage(BadList("--shape", flags.shape, "2,2,2", 63), result);
  const std::vector<std::string> names = SplitList(flags.names);
  absl::StatusOr<Mesh> mesh;
  if (flags.ranks.has_value()) {
    const auto ranks = ParseRanks(*flags.ranks);
    if (!ranks.has_value()) return FailUsage(BadList("--ranks", *flags.ranks, "0,2,1,3", 31), result);
    mesh = Mesh::Create(*shape, names, *ranks);
  } else {
    mesh = Mesh::Create(*shape, names);
  }
  mesh = ApplyAll(std::move(mesh), changes);
  if (!mesh.ok()) return Fail(mesh.status(), result);
  result.out = flags.json ? JsonLine(MeshToJson(*mesh)) : Picture(*mesh);
}

// Ranks [begin, end) as lists nested by sizes[depth], sizes[depth + 1], ...
Json Nested(const Rank* begin, const Rank* end, const std::vector<int64_t>& sizes, size_t depth) {
  Json list = Json::array();
  const bool innermost = depth + 1 == sizes.size();
  const int64_t step = innermost ? 1 : (end - begin) / sizes[depth];
  for (const Rank* at = begin; at != end; at += step) {
    list.push_back(innermost ? Json(at->value()) : Nested(at, at + step, sizes, depth + 1));
  }
  return list;
}

}  // namespace

Json MeshToJson(const Mesh& mesh) {
  const std::vector<int64_t> sizes = mesh.Sizes();
  Json instances = Json::array();
  for (const auto& ranks : mesh.Instances()) {
    instances.push_back(Nested(ranks.data(), ranks.data() + ranks.size(), sizes, 0));
  }
  Json groups = Json::object();
  for (const std::string& name : mesh.Names()) {
    Json& lists = groups[name] = Json::array();
    const std::vector<std::vector<Rank>> along = mesh.Groups({name}).value();  // the mesh's own name: always found
    for (const auto& ranks : along) {
      lists.push_back(Nested(ranks.data(), ranks.data() + ranks.size(), {static_cast<int64_t>(ranks.size())}, 0));
    }
  }
  return {
      {"names", mesh.Names()}, {"sizes", sizes}, {"instances", std::move(instances)}, {"groups", std::move(groups)}};
}

void AddMeshCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command =
      app.add_subcommand("mesh", "Draw a mesh, or a slice of it: which ranks meet along which dimension");
  const auto flags = std::make_shared<Flags>();
  command->add_option("--shape", flags->shape, "Sizes of the dimensions, slowest first, like 2,2,2")->required();
  command->add_option("--names", flags->names, "Names of the dimensions, like ddp,fsdp,tp")->required();
  command->add_option("--ranks", flags->ranks, "The ranks in row-major order (default 0,1,2,...)");
  std::vector<const CLI::Option*> options;
  for (size_t i = 0; i < MeshOptions().size(); ++i) {
    const MeshOption& option = MeshOptions()[i];
    options.push_back(
        command->add_option(option.name, flags->changes[i], absl::StrCat(option.help, ": ", option.example))
            ->allow_extra_args(false));
  }
  command->add_flag("--json", flags->json, "Print {names, sizes, instances, groups} as JSON");
  command->footer(
      "The options from --slice on may be repeated; they apply from left to right. A slice stands for all its\n"
      "instances: one for each choice of the coordinates left out.\n"
      "Examples:\n"
      "  shardctl mesh --shape 2,2,2 --names ddp,fsdp,tp --slice ddp,fsdp --slice fsdp\n"
      "  shardctl mesh --shape 2,2,2 --names ddp,fsdp,tp --flatten ddp,tp=dt --json\n"
      "  shardctl mesh --shape 2,2,2 --names ddp,fsdp,tp --concatenate tp/ddp,fsdp=dp\n"
      "  shardctl mesh --shape 4,2 --names fsdp,tp --restrict 0,1,4,5");
  command->callback([=, &result] {
    std::vector<MeshChange> changes;
    std::vector<size_t> used(options.size());
    for (const CLI::Option* option : command->parse_order()) {  // an entry for every time an option was given
      const size_t i = absl::c_find(options, option) - options.begin();
      if (i == options.size()) continue;
      absl::StatusOr<MeshChange> change = ParseMeshOption(MeshOptions()[i], flags->changes[i][used[i]++]);
      if (!change.ok()) return FailUsage(change.status().message(), result);
      changes.push_back(*std::move(change));
    }
    RunMesh(*flags, changes, result);
  });
}

}  // namespace shardmesh
