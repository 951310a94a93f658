#include "client/cli/commands/support_command.h"

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/base/table.h"
#include "core/job/support.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

std::string FeatureTable() {
  std::vector<std::string> header = {"feature"};
  for (const TopologyKindRow& kind : kTopologyKinds) header.emplace_back(kind.name);
  Table table(std::move(header));
  std::array<int, kNumTopologyKinds> supported = {};
  for (int f = 0; f < kNumFeatures; ++f) {
    std::vector<std::string> row = {std::string(kFeatures[f].name)};
    for (int k = 0; k < kNumTopologyKinds; ++k) {
      const bool works = Works(static_cast<Feature>(f), static_cast<TopologyKind>(k));
      supported[k] += works;
      row.emplace_back(works ? "yes" : "no");
    }
    table.AddRow(std::move(row));
  }
  std::vector<std::string> sums = {absl::StrCat("supported, of ", kNumFeatures)};
  for (const int sum : supported) sums.push_back(absl::StrCat(sum));
  table.AddRow(std::move(sums));
  return table.ToString();
}

std::string PairTable() {
  Table table({"feature", "not with", "because", "instead"});
  for (const RefusedPair& pair : kRefusedPairs) {
    table.AddRow({std::string(RowOf(pair.first).name), std::string(RowOf(pair.second).name),
                  absl::StrCat(pair.because, pair.never ? " (for good)" : ""), std::string(pair.instead)});
  }
  return table.ToString();
}

std::string CountedName(const SupportLimit& limit) {
  const std::string what = limit.counted == Counted::kRanks ? "ranks of a job" : "slots of a job";
  return limit.on_cpu ? what : absl::StrCat(what, ", CUDA");
}

std::string LimitTable() {
  Table table({"limit", "most", "because"});
  for (const SupportLimit& limit : kSupportLimits) {
    table.AddRow({CountedName(limit), absl::StrCat(limit.most), std::string(limit.because)});
  }
  return table.ToString();
}

std::string Text(absl::string_view text) { return std::string(text); }

}  // namespace

std::string SupportTables() { return absl::StrCat(FeatureTable(), "\n", PairTable(), "\n", LimitTable()); }

Json SupportToJson() {
  Json topologies = Json::array(), features = Json::array(), pairs = Json::array(), limits = Json::array();
  for (const TopologyKindRow& kind : kTopologyKinds) topologies.push_back(Text(kind.name));
  for (int f = 0; f < kNumFeatures; ++f) {
    Json cells = Json::array();
    for (int k = 0; k < kNumTopologyKinds; ++k) {
      const absl::string_view test = kFeatures[f].tests[k];
      cells.push_back({{"topology", Text(kTopologyKinds[k].name)},
                       {"supported", !test.empty()},
                       {"test", test.empty() ? Json() : Json(Text(test))}});
    }
    features.push_back({{"feature", Text(kFeatures[f].name)}, {"cells", std::move(cells)}});
  }
  for (const RefusedPair& pair : kRefusedPairs) {
    pairs.push_back({{"features", {Text(RowOf(pair.first).name), Text(RowOf(pair.second).name)}},
                     {"because", Text(pair.because)},
                     {"instead", Text(pair.instead)},
                     {"never", pair.never}});
  }
  for (const SupportLimit& limit : kSupportLimits) {
    limits.push_back({{"limit", CountedName(limit)}, {"most", limit.most}, {"because", Text(limit.because)}});
  }
  return {{"topologies", std::move(topologies)},
          {"features", std::move(features)},
          {"refused_pairs", std::move(pairs)},
          {"limits", std::move(limits)}};
}

void AddSupportCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("support", "What a job may have on which topology, of this build");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, with the label of a test that shows each supported cell");
  command->footer(
      "A job that needs what a topology does not support waits for workers of another one; `shardctl jobs` says why.\n"
      "What is asked of a job later, such as a checkpoint, is refused with UNIMPLEMENTED.\n"
      "Examples:\n"
      "  shardctl support\n"
      "  shardctl support --json");
  command->callback([json, &result] { result.out = *json ? JsonLine(SupportToJson()) : SupportTables(); });
}

}  // namespace shardmesh
