// `shardctl plan JOB`: where every element of a job lies, computed here and compared with the coordinator's hash.
#pragma once

#include <CLI/App.hpp>
#include <string>

#include "client/cli/base/command.h"
#include "core/job/job.h"
#include "core/job/plan.h"

namespace shardmesh {

void AddPlanCommand(CLI::App& app, CommandResult& result);

// {job, hash, shards, replicas, version_bytes, window_bytes, buckets, placements}. REQUIRES: `plan` is that of `job`.
nlohmann::ordered_json PlanToJson(const JobSpec& job, const Plan& plan);

// For people: totals, the buckets, the placements with the letter that marks each parameter, and a bar per shard in
// which every column stands for an equal stretch: the letter of the parameter that has most of it, "." where all of it
// is padding. The numbers beside the bar are exact. Same requirement.
std::string DrawPlan(const JobSpec& job, const Plan& plan);

}  // namespace shardmesh
