#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "core/names/names.h"
#include "tests/fuzz/targets.h"

namespace shardmesh::fuzz {
namespace {

void Check(bool promise, const char* what) {
  if (promise) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

std::vector<std::string> List(absl::string_view field) { return absl::StrSplit(field, ',', absl::SkipEmpty()); }

void CheckTable(const std::vector<absl::string_view>& names, const NameRules& rules) {
  AliasTable table(rules);
  for (const absl::string_view raw : names) {
    const absl::StatusOr<std::string> canonical = table.Add(raw);
    if (!canonical.ok()) continue;
    Check(*table.CanonicalOf(raw) == *canonical, "a name that was added has its canonical name");
    Check(table.RawOf(*canonical)->front() == raw, "and back");
  }
  Check(table.Storages().size() == table.num_raw_names(), "without ties every name has its own storage");
}

}  // namespace

void Names(absl::string_view input) {
  const std::vector<absl::string_view> fields = absl::StrSplit(input, '\n');
  if (fields.size() < 4) return;
  NameRules rules;
  rules.root_wrappers = List(fields[0]);
  for (const std::string& prefix : List(fields[1])) rules.literal.insert(prefix);
  for (const std::string& prefix : List(fields[2])) rules.wrapped_at.insert(prefix);
  const std::vector<absl::string_view> names(fields.begin() + 3, fields.end());
  const absl::StatusOr<NameRules> canonical_rules = CanonicalRules(rules);
  for (const absl::string_view raw : names) {
    const absl::StatusOr<std::string> canonical = Canonical(raw, rules);
    Check(canonical.ok() == (ValidateName(raw).ok() && canonical_rules.ok()), "valid names under valid rules have one");
    if (!canonical.ok()) continue;
    Check(ValidateName(*canonical).ok(), "a canonical name is a name");
    Check(canonical->size() <= raw.size(), "nothing is added");
    Check(*Canonical(*canonical, *canonical_rules) == *canonical, "a canonical name is its own canonical name");
  }
  if (canonical_rules.ok()) CheckTable(names, rules);
}

}  // namespace shardmesh::fuzz
