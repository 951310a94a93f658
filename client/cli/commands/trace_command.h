// shardctl trace: what the workers of a job did and when, as a file that trace viewers draw.
#pragma once

#include <CLI/App.hpp>
#include <set>
#include <string>
#include <vector>

#include "client/cli/base/command.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {

void AddTraceCommand(CLI::App& app, CommandResult& result);

// The spans of one job's workers in the Trace Event Format that Perfetto and chrome://tracing read ("JSON object
// format", complete and instant events): a process for each rank, a row for each of its threads, microseconds from the
// first span on. Spans of steps before the `steps` newest ones are left out; 0: none is. Pure, thread-safe.
nlohmann::ordered_json ChromeTrace(const std::vector<v1::GetTraceReply>& ranks, int64_t steps);

// What one worker did in the steps from `first_step` on: seconds in commands, and seconds of waiting for others behind
// them. Parts of a command, and what crosses between hosts while commands run, are in no sum. Pure, thread-safe.
struct TraceSum {
  std::set<int64_t> steps;
  int64_t spans = 0;
  double working = 0, waiting = 0;
};
TraceSum SumOf(const v1::GetTraceReply& rank, int64_t first_step);

}  // namespace shardmesh
