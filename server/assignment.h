// Which workers become a job's members. Pure, thread-safe.
//
// A job needs one worker for each rank of its mesh, all of one host where one has so many: the step's single pass reads
// and writes memory that its members share, which is a CUDA device's for all of them or for none. Else the ranks are
// divided evenly among as few hosts as will do, of workers on processors that say that others reach them. A worker may
// serve many jobs. Workers on CUDA devices come before those on processors. Among hosts with enough workers those win
// whose chosen workers serve the fewest jobs (then by host_id), and on each the workers that serve the fewest jobs
// (then by name); ranks in that order, host by host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/records.h"

namespace shardmesh {

struct Candidate {
  const WorkerIdentity* worker = nullptr;  // alive, and not excluded from the job
  int num_jobs = 0;                        // that it serves
  WorkerTraits traits;
};

// What a job asks of its members.
struct Demand {
  int64_t num_ranks = 1;           // REQUIRES: >= 1
  std::string refused_by_devices;  // why workers on CUDA devices cannot do it; empty: they can
};

struct Choice {
  std::vector<WorkerIdentity> members;  // by rank; empty: not enough workers
  std::string waiting_for;              // then what is missing, e.g. "4 live workers on one host; host a1 has 2"
  bool on_devices = false;              // the members' steps run on CUDA devices
  int64_t passed_over = 0;              // workers on CUDA devices, which cannot do it
};

Choice ChooseMembers(const Demand& demand, std::vector<Candidate> candidates);

}  // namespace shardmesh
