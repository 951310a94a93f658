// The table of what a job may have (core/job/support_table.h), as arguments of Python are checked by it.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/job/support_table.h"
#include "python/binding/binding.h"

namespace shardmesh::python {
namespace {

absl::StatusOr<Feature> FeatureNamed(absl::string_view name) {
  for (const FeatureRow& row : kFeatures) {
    if (row.name == name) return row.feature;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown feature \"", absl::CHexEscape(name), "\"; shardctl support lists them"));
}

// `names`: of features, as the table has them.
absl::Status CheckAllTogether(const std::string& who, const std::vector<std::string>& names) {
  std::vector<Feature> features;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const Feature feature, FeatureNamed(name));
    for (const Feature other : features) RETURN_IF_ERROR(CheckTogether(who, other, feature));
    features.push_back(feature);
  }
  return absl::OkStatus();
}

}  // namespace

void BindSupport(py::module_& module) {
  module.def(
      "check_together",
      [](Text who, std::vector<Text> features) {
        const absl::Status status = CheckAllTogether(who.value, ToVector(std::move(features)));
        if (!status.ok()) throw StatusError(status);
      },
      py::arg("who"), py::arg("features"));
}

}  // namespace shardmesh::python
