#include "client/cli/commands/mesh_changes.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/commands/lists.h"
#include "core/base/ids.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Names = std::vector<std::string>;

// "a=b" as {"a", "b"}; without the "=", the second is empty.
std::pair<std::string, std::string> SplitOnce(absl::string_view text, char at) {
  return absl::StrSplit(text, absl::MaxSplits(at, 1));
}

// Each of these: nullopt when `text` has another form.

std::optional<MeshChange> Slice(absl::string_view text) {
  return [names = SplitList(text)](const Mesh& mesh) { return mesh.Slice(names); };
}

std::optional<MeshChange> Transpose(absl::string_view text) {
  return [names = SplitList(text)](const Mesh& mesh) { return mesh.Transpose(names); };
}

std::optional<MeshChange> FlattenInto(absl::string_view text, bool keep_rest) {
  auto [names, into] = SplitOnce(text, '=');
  if (into.empty()) return std::nullopt;
  return [names = SplitList(names), into = std::move(into), keep_rest](const Mesh& mesh) {
    return mesh.Flatten(names, into, keep_rest);
  };
}

std::optional<MeshChange> Flatten(absl::string_view text) { return FlattenInto(text, /*keep_rest=*/true); }

std::optional<MeshChange> Unflatten(absl::string_view text) {
  auto [name, dims] = SplitOnce(text, '=');
  Names names;
  std::vector<int64_t> sizes;
  for (const std::string& dim : SplitList(dims)) {
    auto [label, size] = SplitOnce(dim, ':');
    names.push_back(std::move(label));
    if (!absl::SimpleAtoi(size, &sizes.emplace_back())) return std::nullopt;
  }
  if (names.empty()) return std::nullopt;
  return [name = std::move(name), sizes, names](const Mesh& mesh) { return mesh.Unflatten(name, sizes, names); };
}

std::optional<MeshChange> Concatenate(absl::string_view text) {
  std::vector<MeshChange> parts;
  for (const absl::string_view part : absl::StrSplit(text, '/')) {
    const bool flattened = part.find('=') != part.npos;
    std::optional<MeshChange> made = flattened ? FlattenInto(part, /*keep_rest=*/false) : Slice(part);
    if (!made.has_value()) return std::nullopt;
    parts.push_back(*std::move(made));
  }
  return [parts = std::move(parts)](const Mesh& mesh) -> absl::StatusOr<Mesh> {
    std::vector<Mesh> made;
    for (const MeshChange& part : parts) {
      ASSIGN_OR_RETURN(Mesh one, part(mesh));
      made.push_back(std::move(one));
    }
    return Mesh::Concatenate(made);
  };
}

std::optional<MeshChange> Restrict(absl::string_view text) {
  const std::optional<std::vector<Rank>> ranks = ParseRanks(text);
  if (!ranks.has_value()) return std::nullopt;
  return [ranks = *ranks](const Mesh& mesh) { return mesh.Restrict(ranks); };
}

constexpr MeshOption kOptions[] = {
    {"--slice", "Keep these dimensions, in this order", "a,b", Slice},
    {"--transpose", "All dimensions, in their new order", "b,a", Transpose},
    {"--flatten", "Make one dimension of several, the first slowest", "a,b=ab", Flatten},
    {"--unflatten", "Make several dimensions of one, the first slowest", "a=b:2,c:4", Unflatten},
    {"--concatenate", "Dimensions of parts side by side; a part is a slice, or a slice flattened", "c/a,b=ab",
     Concatenate},
    {"--restrict", "Only these ranks; they must be a grid", "0,1,4,5", Restrict},
};

}  // namespace

absl::Span<const MeshOption> MeshOptions() { return kOptions; }

absl::StatusOr<MeshChange> ParseMeshOption(const MeshOption& option, absl::string_view text) {
  std::optional<MeshChange> change = option.parse(text);
  if (change.has_value()) return *std::move(change);
  return absl::InvalidArgumentError(
      absl::StrCat(option.name, " \"", absl::CHexEscape(text), "\" has another form; write it like ", option.example));
}

}  // namespace shardmesh
