// Which workers become a job's members. Pure, thread-safe.
//
// A job needs one worker for each rank of its mesh, equally many on each of some hosts, and all of them on CUDA devices
// or none. Replicas come on different hosts where there are such hosts, so that the loss of one loses no shard; else the
// job comes on as few hosts as will do, since members of one host share memory (HostCounts, core/mesh/reform.h). Several
// hosts are asked together only of workers that say that others reach them. A worker may serve many jobs. Workers on
// CUDA devices come before those on processors. Among hosts with enough workers those win whose chosen workers serve the
// fewest jobs (then by host_id), and on each the workers that serve the fewest jobs (then by name); ranks in that order,
// host by host.
//
// A job is never placed where the table of support refuses it (core/job/support.h): it waits for workers elsewhere. To
// refuse it instead would make the answer of CreateJob depend on which workers have joined so far, and jobs are made
// before their workers. The reason why it waits has the table's words, if the workers that live would do but for it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/job/support_table.h"
#include "server/store/records.h"

namespace shardmesh {

struct Candidate {
  const WorkerIdentity* worker = nullptr;  // alive, and not excluded from the job
  int num_jobs = 0;                        // that it serves
  WorkerTraits traits;
};

// What a job asks of its members.
struct Demand {
  int64_t num_ranks = 1;  // REQUIRES: >= 1
  std::vector<int64_t> host_counts = {1};  // the numbers of hosts to try, the best first; each divides num_ranks
  // By TopologyKind: why it cannot be there, and what would work; empty: it can.
  std::array<std::string, kNumTopologyKinds> refused = {};

  const std::string& refusal(int64_t num_hosts, bool on_devices) const {
    const TopologyKind one = on_devices ? TopologyKind::kHostCuda : TopologyKind::kHostCpu;
    const TopologyKind several = on_devices ? TopologyKind::kHostsCuda : TopologyKind::kHostsCpu;
    return refused[static_cast<int>(num_hosts > 1 ? several : one)];
  }
};

struct Choice {
  std::vector<WorkerIdentity> members;  // by rank; empty: not enough workers
  std::string waiting_for;              // then what is missing, e.g. "4 live workers on one host; host a1 has 2"
  bool on_devices = false;              // the members' steps run on CUDA devices
  int64_t passed_over = 0;              // workers on CUDA devices of one host, which cannot do it
};

Choice ChooseMembers(const Demand& demand, std::vector<Candidate> candidates);

}  // namespace shardmesh
