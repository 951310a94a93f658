#include "core/mesh/mesh_spec.h"

#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr size_t kMaxQuotedBytes = 80;

// A value from outside, made safe and short for a message.
std::string Quoted(absl::string_view value) {
  const bool cut = value.size() > kMaxQuotedBytes;
  return absl::StrCat("\"", absl::CHexEscape(value.substr(0, kMaxQuotedBytes)), cut ? "...\"" : "\"");
}

// One part of the text: "name=size" or "name:role=size".
absl::StatusOr<MeshDim> ParseDim(absl::string_view part) {
  const std::vector<absl::string_view> sides = absl::StrSplit(part, '=');
  if (sides.size() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: ", Quoted(part), " is not a dimension; write name=size or name:role=size, like fsdp=4"));
  }
  const std::pair<absl::string_view, absl::string_view> head = absl::StrSplit(sides[0], absl::MaxSplits(':', 1));
  MeshDim dim;
  dim.name = std::string(head.first);
  RETURN_IF_ERROR(ValidateDimName(dim.name));
  dim.role = DefaultDimRole(dim.name);
  if (absl::StrContains(sides[0], ':')) {
    ASSIGN_OR_RETURN(dim.role, ParseDimRole(head.second));
  }
  const bool digits = !sides[1].empty() && absl::c_all_of(sides[1], absl::ascii_isdigit);
  if (!digits || !absl::SimpleAtoi(sides[1], &dim.size)) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: dimension ", dim.name, " has size ", Quoted(sides[1]),
                                                   "; a size is a whole number from 1 to ", kMaxMeshRanks));
  }
  return dim;
}

}  // namespace

absl::string_view DimRoleName(DimRole role) {
  switch (role) {
    case DimRole::kReplicate:
      return "replicate";
    case DimRole::kShard:
      return "shard";
  }
  return "unknown";
}

absl::StatusOr<DimRole> ParseDimRole(absl::string_view text) {
  for (const DimRole role : {DimRole::kReplicate, DimRole::kShard}) {
    if (text == DimRoleName(role)) return role;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("mesh: ", Quoted(text), " is not a role of a dimension; the roles are replicate and shard"));
}

DimRole DefaultDimRole(absl::string_view name) {
  const bool replicates = name == "ddp" || name == "dp_replicate" || name == "replicate";
  return replicates ? DimRole::kReplicate : DimRole::kShard;
}

absl::Status ValidateDimName(absl::string_view name) {
  bool good = !name.empty() && name.size() <= kMaxDimNameBytes && !absl::ascii_isdigit(name[0]);
  for (const char c : name) good = good && (absl::ascii_isalnum(c) || c == '_');
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mesh: ", Quoted(name), " is not a name of a dimension; a name is a letter or \"_\", then letters, ",
                   "digits or \"_\", at most ", kMaxDimNameBytes, " bytes"));
}

absl::Status MeshSpec::Validate() const {
  if (dims.empty()) {
    return absl::InvalidArgumentError("mesh: no dimension; write at least one, like fsdp=1 for a single rank");
  }
  if (dims.size() > kMaxMeshDims) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mesh: ", dims.size(), " dimensions are too many; at most ", kMaxMeshDims, " are supported"));
  }
  std::set<absl::string_view> seen;
  int64_t ranks = 1;
  for (const MeshDim& dim : dims) {
    RETURN_IF_ERROR(ValidateDimName(dim.name));
    if (!seen.insert(dim.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: dimension ", dim.name, " is given twice; every dimension needs its own name"));
    }
    if (dim.size < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: dimension ", dim.name, " has size ", dim.size, "; a size is at least 1"));
    }
    if (dim.role != DimRole::kReplicate && dim.role != DimRole::kShard) {
      return absl::InvalidArgumentError(absl::StrCat("mesh: dimension ", dim.name, " has the unknown role value ",
                                                     static_cast<int>(dim.role), "; roles are replicate and shard"));
    }
    if (dim.size > kMaxMeshRanks / ranks) {
      return absl::ResourceExhaustedError(absl::StrCat("mesh: with dimension ", dim.name, "=", dim.size,
                                                       " the mesh has more than ", kMaxMeshRanks,
                                                       " ranks; use smaller sizes"));
    }
    ranks *= dim.size;
  }
  return absl::OkStatus();
}

int64_t MeshSpec::NumRanks() const { return NumRanks(DimRole::kReplicate) * NumRanks(DimRole::kShard); }

int64_t MeshSpec::NumRanks(DimRole role) const {
  int64_t ranks = 1;
  for (const MeshDim& dim : dims) ranks *= dim.role == role ? dim.size : 1;
  return ranks;
}

std::string MeshSpec::ToString() const {
  return absl::StrJoin(dims, ",", [](std::string* out, const MeshDim& dim) {
    const bool usual = dim.role == DefaultDimRole(dim.name);
    absl::StrAppend(out, dim.name, usual ? "" : ":", usual ? "" : DimRoleName(dim.role), "=", dim.size);
  });
}

absl::StatusOr<MeshSpec> ParseMeshSpec(absl::string_view text) {
  MeshSpec spec;
  if (!text.empty()) {
    for (const absl::string_view part : absl::StrSplit(text, ',')) {
      if (spec.dims.size() > kMaxMeshDims) break;  // Validate says so; the rest of a huge text is not worth reading
      ASSIGN_OR_RETURN(MeshDim dim, ParseDim(part));
      spec.dims.push_back(std::move(dim));
    }
  }
  RETURN_IF_ERROR(spec.Validate());
  return spec;
}

}  // namespace shardmesh
