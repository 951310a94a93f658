// Which workers become a job's members. Pure, thread-safe.
//
// A job needs one worker for each rank of its mesh, all of one host: the step's single pass reads and writes memory
// that its members share. A worker may serve many jobs. Among hosts with enough workers the one whose chosen workers
// serve the fewest jobs wins (then by host_id), and on it the workers that serve the fewest jobs (then by name); ranks
// in that order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/records.h"

namespace shardmesh {

struct Candidate {
  const WorkerIdentity* worker = nullptr;  // alive, and not excluded from the job
  int num_jobs = 0;                        // that it serves
};

struct Choice {
  std::vector<WorkerIdentity> members;  // by rank; empty: not enough workers
  std::string waiting_for;              // then what is missing, e.g. "4 live workers on one host; host a1 has 2"
};

// REQUIRES: num_ranks >= 1.
Choice ChooseMembers(int64_t num_ranks, std::vector<Candidate> candidates);

}  // namespace shardmesh
