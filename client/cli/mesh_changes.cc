#include "client/cli/mesh_changes.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/ids.h"
#include "core/status.h"

namespace shardmesh {
namespace {

using Names = std::vector<std::string>;

Names SplitNames(absl::string_view text) {
  if (text.empty()) return {};
  return absl::StrSplit(text, ',');
}

// "a=b" as {"a", "b"}; without the "=", the second is empty.
std::pair<std::string, std::string> SplitOnce(absl::string_view text, char at) {
  return absl::StrSplit(text, absl::MaxSplits(at, 1));
}

// Each of these: nullopt when `text` has another form.

std::optional<MeshChange> Flatten(absl::string_view text, bool keep_rest) {
  auto [names, into] = SplitOnce(text, '=');
  if (into.empty()) return std::nullopt;
  return [names = SplitNames(names), into = std::move(into), keep_rest](const Mesh& mesh) {
    return mesh.Flatten(names, into, keep_rest);
  };
}

std::optional<MeshChange> Unflatten(absl::string_view text) {
  auto [name, dims] = SplitOnce(text, '=');
  Names names;
  std::vector<int64_t> sizes;
  for (const std::string& dim : SplitNames(dims)) {
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
    if (part.find('=') == part.npos) {
      parts.emplace_back([names = SplitNames(part)](const Mesh& mesh) { return mesh.Slice(names); });
      continue;
    }
    std::optional<MeshChange> flattened = Flatten(part, /*keep_rest=*/false);
    if (!flattened.has_value()) return std::nullopt;
    parts.push_back(*std::move(flattened));
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
  std::vector<Rank> ranks;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int32_t rank = 0;
    if (!absl::SimpleAtoi(part, &rank)) return std::nullopt;
    ranks.push_back(Rank(rank));
  }
  return [ranks = std::move(ranks)](const Mesh& mesh) { return mesh.Restrict(ranks); };
}

std::optional<MeshChange> Parse(absl::string_view option, absl::string_view text) {
  if (option == "--slice") return [names = SplitNames(text)](const Mesh& mesh) { return mesh.Slice(names); };
  if (option == "--transpose") return [names = SplitNames(text)](const Mesh& mesh) { return mesh.Transpose(names); };
  if (option == "--flatten") return Flatten(text, /*keep_rest=*/true);
  if (option == "--unflatten") return Unflatten(text);
  if (option == "--concatenate") return Concatenate(text);
  return Restrict(text);
}

}  // namespace

absl::StatusOr<MeshChange> ParseMeshOption(absl::string_view option, absl::string_view text) {
  std::optional<MeshChange> change = Parse(option, text);
  if (change.has_value()) return *std::move(change);
  for (const MeshOption& known : kMeshOptions) {
    if (option != known.name) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(option, " \"", absl::CHexEscape(text), "\" has another form; write it like ", known.example));
  }
  return absl::InternalError(absl::StrCat("no operation on a mesh is called ", option));
}

}  // namespace shardmesh
