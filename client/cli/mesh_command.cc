#include "client/cli/mesh_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/table.h"
#include "core/ids.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxDrawnRanks = 1024;
constexpr int64_t kMaxDrawnColumns = 64;

struct Flags {
  std::string shape, names, ranks;
  std::vector<std::string> slices, transposes, flattens;
  bool json = false;
};

enum class Operation { kSlice, kTranspose, kFlatten };

struct Change {
  Operation operation;
  std::string argument;
};

std::vector<std::string> SplitNames(absl::string_view text) {
  if (text.empty()) return {};
  return absl::StrSplit(text, ',');
}

// The comma-separated whole numbers of `text`, nullopt when it has any other form.
template <typename T>
std::optional<std::vector<T>> ParseNumbers(absl::string_view text) {
  std::vector<T> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(part, &numbers.emplace_back())) return std::nullopt;
  }
  return numbers;
}

std::string BadList(absl::string_view flag, absl::string_view value, absl::string_view example) {
  return absl::StrCat(flag, " \"", absl::CHexEscape(value), "\" is not a list of whole numbers; write it like ",
                      example);
}

absl::StatusOr<Mesh> ApplyChange(const Mesh& mesh, const Change& change) {
  if (change.operation == Operation::kSlice) return mesh.Slice(SplitNames(change.argument));
  if (change.operation == Operation::kTranspose) return mesh.Transpose(SplitNames(change.argument));
  const std::pair<absl::string_view, absl::string_view> sides =
      absl::StrSplit(change.argument, absl::MaxSplits('=', 1));
  return mesh.Flatten(SplitNames(sides.first), sides.second);
}

absl::StatusOr<Mesh> ApplyAll(absl::StatusOr<Mesh> mesh, const std::vector<Change>& changes) {
  for (size_t i = 0; mesh.ok() && i < changes.size(); ++i) mesh = ApplyChange(*mesh, changes[i]);
  return mesh;
}

void RunMesh(const Flags& flags, const std::vector<Change>& changes, CommandResult& result) {
  const auto shape = ParseNumbers<int64_t>(flags.shape);
  if (!shape.has_value()) return FailUsage(BadList("--shape", flags.shape, "2,2,2"), result);
  for (const Change& change : changes) {
    if (change.operation != Operation::kFlatten || absl::StrContains(change.argument, '=')) continue;
    return FailUsage(absl::StrCat("--flatten \"", absl::CHexEscape(change.argument),
                                  "\" names no new dimension; write ", "it like ddp,fsdp=dp"),
                     result);
  }
  std::vector<Rank> ranks;
  if (!flags.ranks.empty()) {
    const auto numbers = ParseNumbers<int32_t>(flags.ranks);
    if (!numbers.has_value()) return FailUsage(BadList("--ranks", flags.ranks, "0,2,1,3"), result);
    for (const int32_t number : *numbers) ranks.push_back(Rank(number));
  }
  const std::vector<std::string> names = SplitNames(flags.names);
  const absl::StatusOr<Mesh> mesh =
      ApplyAll(ranks.empty() ? Mesh::Create(*shape, names) : Mesh::Create(*shape, names, ranks), changes);
  if (!mesh.ok()) return Fail(mesh.status(), result);
  result.out = flags.json ? JsonLine(MeshToJson(*mesh)) : DrawMesh(*mesh);
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

std::string Plural(int64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::vector<std::string> RankRow(std::string label, const std::vector<Rank>& ranks, int64_t first, int64_t count) {
  std::vector<std::string> row = {std::move(label)};
  for (int64_t i = first; i < first + count; ++i) row.push_back(absl::StrCat(ranks[i].value()));
  return row;
}

std::vector<std::string> Header(std::string corner, const MeshAxis& across) {
  std::vector<std::string> header = {std::move(corner)};
  for (int64_t i = 0; i < across.size; ++i) header.push_back(absl::StrCat(across.name, "=", i));
  return header;
}

// All instances of a one-dimensional mesh: a row each.
std::string DrawLines(const Mesh& mesh, const MeshAxis& across) {
  const bool one = mesh.NumInstances() == 1;
  Table table(Header(one ? "" : "instance", across));
  int64_t index = 0;
  for (const auto& ranks : mesh.Instances())
    table.AddRow(RankRow(one ? "rank" : absl::StrCat(index++), ranks, 0, across.size));
  return absl::StrCat("\n", table.ToString());
}

// One instance: a table for each choice of all but the last two dimensions.
std::string DrawInstance(const std::vector<MeshAxis>& axes, const std::vector<Rank>& ranks, const std::string& title) {
  const MeshAxis& down = axes[axes.size() - 2];
  const MeshAxis& across = axes.back();
  const int64_t page = down.size * across.size;
  std::string out;
  for (int64_t first = 0; first < static_cast<int64_t>(ranks.size()); first += page) {
    std::vector<std::string> corner;
    int64_t rest = first / page;
    for (size_t d = axes.size() - 2; d-- > 0; rest /= axes[d].size) {
      corner.insert(corner.begin(), absl::StrCat(axes[d].name, "=", rest % axes[d].size));
    }
    if (!title.empty()) corner.insert(corner.begin(), title);
    Table table(Header(absl::StrJoin(corner, ", "), across));
    for (int64_t i = 0; i < down.size; ++i) {
      table.AddRow(RankRow(absl::StrCat(down.name, "=", i), ranks, first + i * across.size, across.size));
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  return out;
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
    const std::vector<std::vector<Rank>> along = mesh.Groups(name).value();  // the mesh's own name: always found
    for (const auto& ranks : along) {
      lists.push_back(Nested(ranks.data(), ranks.data() + ranks.size(), {static_cast<int64_t>(ranks.size())}, 0));
    }
  }
  return {
      {"names", mesh.Names()}, {"sizes", sizes}, {"instances", std::move(instances)}, {"groups", std::move(groups)}};
}

std::string DrawMesh(const Mesh& mesh) {
  const std::vector<MeshAxis> axes = mesh.Axes();
  const std::string shape = absl::StrJoin(
      axes, " x ", [](std::string* out, const MeshAxis& axis) { absl::StrAppend(out, axis.name, "=", axis.size); });
  std::string out = absl::StrCat("mesh ", shape, ": ", Plural(mesh.NumInstances(), "instance"), " of ",
                                 Plural(mesh.NumRanksPerInstance(), "rank"), "\n");
  if (mesh.NumRanks() > kMaxDrawnRanks || axes.back().size > kMaxDrawnColumns) {
    return absl::StrCat(out, "Too large to draw; --json lists every rank.\n");
  }
  if (axes.size() == 1) return absl::StrCat(out, DrawLines(mesh, axes.back()));
  int64_t index = 0;
  for (const auto& ranks : mesh.Instances()) {
    const std::string title = mesh.NumInstances() == 1 ? "" : absl::StrCat("instance ", index++);
    absl::StrAppend(&out, DrawInstance(axes, ranks, title));
  }
  return out;
}

void AddMeshCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command =
      app.add_subcommand("mesh", "Draw a mesh, or a slice of it: which ranks meet along which dimension");
  const auto flags = std::make_shared<Flags>();
  command->add_option("--shape", flags->shape, "Sizes of the dimensions, slowest first, like 2,2,2")->required();
  command->add_option("--names", flags->names, "Names of the dimensions, like ddp,fsdp,tp")->required();
  command->add_option("--ranks", flags->ranks, "The ranks in row-major order (default 0,1,2,...)");
  CLI::Option* slice = command->add_option("--slice", flags->slices, "Keep these dimensions, in the mesh's own order");
  CLI::Option* transpose = command->add_option("--transpose", flags->transposes, "All dimensions, in their new order");
  CLI::Option* flatten = command->add_option("--flatten", flags->flattens, "Make one dimension of several: a,b=name");
  for (CLI::Option* option : {slice, transpose, flatten}) option->allow_extra_args(false);
  command->add_flag("--json", flags->json, "Print {names, sizes, instances, groups} as JSON");
  command->footer(
      "--slice, --transpose and --flatten may be repeated; they apply from left to right. A slice stands for all its\n"
      "instances: one for each choice of the coordinates left out.\n"
      "Examples:\n"
      "  shardctl mesh --shape 2,2,2 --names ddp,fsdp,tp --slice ddp,fsdp --slice fsdp\n"
      "  shardctl mesh --shape 2,2,2 --names ddp,fsdp,tp --flatten ddp,tp=dt --json");
  command->callback([=, &result] {
    std::vector<Change> changes;
    size_t slices = 0, transposes = 0, flattens = 0;
    for (const CLI::Option* option : command->parse_order()) {  // an entry for every time an option was given
      if (option == slice) changes.push_back({Operation::kSlice, flags->slices[slices++]});
      if (option == transpose) changes.push_back({Operation::kTranspose, flags->transposes[transposes++]});
      if (option == flatten) changes.push_back({Operation::kFlatten, flags->flattens[flattens++]});
    }
    RunMesh(*flags, changes, result);
  });
}

}  // namespace shardmesh
