#include "core/names/optimizer_names.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kState = "state";
constexpr absl::string_view kParamGroups = "param_groups";

absl::Status ValidatePrefix(absl::string_view prefix) {
  RETURN_IF_ERROR(Annotate(ValidateName(prefix), "optimizer prefix"));
  for (const absl::string_view segment : absl::StrSplit(prefix, '.')) {
    if (segment != kState && segment != kParamGroups) continue;
    return absl::InvalidArgumentError(absl::StrCat("optimizer prefix ", QuotedName(prefix), " has the segment ",
                                                   segment, ", which begins the rest; give what stands before that"));
  }
  return absl::OkStatus();
}

absl::Status BadForm(absl::string_view name, absl::string_view problem, const std::vector<std::string>& prefixes) {
  return absl::InvalidArgumentError(absl::StrCat(
      "name ", QuotedName(name), " ", problem, "; optimizer state is named state.PARAMETER.STATE or ",
      "param_groups.PARAMETER.FIELD",
      prefixes.empty() ? "" : absl::StrCat(", maybe behind a prefix of ", QuotedName(absl::StrJoin(prefixes, ", ")))));
}

// Takes "head." off the front of `text`.
bool Consume(absl::string_view* text, absl::string_view head) {
  if (!absl::StartsWith(*text, head) || text->substr(head.size(), 1) != ".") return false;
  text->remove_prefix(head.size() + 1);
  return true;
}

}  // namespace

std::string OptimizerName::ToString() const {
  return absl::StrCat(prefix, prefix.empty() ? "" : ".", kind == OptimizerNameKind::kState ? kState : kParamGroups, ".",
                      parameter, ".", state);
}

absl::StatusOr<OptimizerName> ParseOptimizerName(absl::string_view name, const std::vector<std::string>& prefixes) {
  RETURN_IF_ERROR(ValidateName(name));
  std::vector<std::string> heads = {""};
  for (const std::string& prefix : prefixes) {
    RETURN_IF_ERROR(ValidatePrefix(prefix));
    heads.push_back(prefix);
  }
  for (std::string& head : heads) {  // at most one fits: no prefix has the segments that must follow it
    absl::string_view rest = name;
    if (!head.empty() && !Consume(&rest, head)) continue;
    const bool group = Consume(&rest, kParamGroups);
    if (!group && !Consume(&rest, kState)) continue;
    const size_t dot = rest.rfind('.');
    if (dot == rest.npos) return BadForm(name, "has no parameter or no state", prefixes);
    return OptimizerName{std::move(head), group ? OptimizerNameKind::kParamGroup : OptimizerNameKind::kState,
                         std::string(rest.substr(0, dot)), std::string(rest.substr(dot + 1))};
  }
  return BadForm(name, "does not begin like one of optimizer state", prefixes);
}

absl::StatusOr<std::string> CanonicalOptimizerName(absl::string_view raw, const Canonicalizer& parameters,
                                                   const std::vector<std::string>& prefixes) {
  ASSIGN_OR_RETURN(OptimizerName name, ParseOptimizerName(raw, prefixes));
  ASSIGN_OR_RETURN(name.parameter, parameters.Canonical(name.parameter));
  return name.ToString();
}

}  // namespace shardmesh
