#include "client/cli/commands/faults_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "client/cli/base/table.h"
#include "core/base/fault_point.h"

namespace shardmesh {
namespace {

const char* NameOf(FaultStage stage) {
  switch (stage) {
    case FaultStage::kPreparing:
      return "preparing";
    case FaultStage::kMoving:
      return "moving";
    case FaultStage::kCalling:
      return "calling";
    case FaultStage::kStepping:
      return "stepping";
    case FaultStage::kPulled:
      return "pulled";
    case FaultStage::kSaving:
      return "saving";
    case FaultStage::kLoading:
      return "loading";
  }
  return "-";
}

std::string FaultsText() {
  Table table({"point", "when", "who", "actions", "what is the case"});
  for (const FaultPointInfo& info : kFaultPoints) {
    table.AddRow({info.name, NameOf(info.stage), info.lead ? "lead" : "any member",
                  info.can_fail ? "kill stop delay error" : "kill stop delay", info.what});
  }
  return table.ToString();
}

std::string FaultsJson() {
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  for (const FaultPointInfo& info : kFaultPoints) {
    nlohmann::ordered_json actions = {"kill", "stop", "delay"};
    if (info.can_fail) actions.push_back("error");
    points.push_back({{"name", info.name},
                      {"stage", NameOf(info.stage)},
                      {"lead_only", info.lead},
                      {"actions", actions},
                      {"what", info.what}});
  }
  return JsonLine({{"points", points}});
}

}  // namespace

void AddFaultsCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("faults", "List the points at which a faulty worker can come to harm");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One line of JSON");
  command->footer(
      "A faulty worker (//tests/testing:faulty_worker) does what SHARDMESH_FAULT=WORKER:POINT:ACTION:NTH says.\n"
      "Examples:\n"
      "  shardctl faults\n"
      "  shardctl faults --json");
  command->callback([json, &result] { result.out = *json ? FaultsJson() : FaultsText(); });
}

}  // namespace shardmesh
