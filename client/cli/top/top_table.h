// How `shardctl top` prints what it sees: tables for people, a line of JSON for programs. Pure, thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/base/command.h"
#include "client/cli/top/top_view.h"

namespace shardmesh {

// One refresh.
struct TopView {
  absl::Time time;
  std::vector<JobView> jobs;      // by name
  std::string coordinator_error;  // why the coordinator did not answer; its jobs are then those of its last answer
};

// A table of the jobs, one of their workers, one of their slots and one of trainers that pull them; control bytes of
// values are written as \xNN.
std::string TopText(const TopView& view);

// {"time","coordinator_error","jobs":[{...,"workers":[...],"slots":[...],"trainers":[...]}]}; what is not known is
// null, the steps "committed_step" and "last_step" are -1 where there is none. Shares go from 0 to 1, times are
// seconds.
nlohmann::ordered_json TopJson(const TopView& view);

// What to write for a refresh: on a terminal over what was there before, else behind the block before and an empty
// line.
std::string Redraw(absl::string_view block, bool terminal, bool first);

}  // namespace shardmesh
