// On which hosts a job's members are, and what the loss of one of them would take: for `shardctl plan JOB`.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "client/cli/base/command.h"
#include "core/job/job.h"
#include "proto/shardmesh/v1/job.pb.h"

namespace shardmesh {

struct HostOfJob {
  std::string host;
  std::vector<int> ranks;
  std::vector<std::string> workers;
  std::set<int> shards;
  std::set<int> only_here;  // shards of which no other host has a replica
};

// In the order of ranks. Empty: the job has no members yet.
std::vector<HostOfJob> HostsOfJob(const google::protobuf::RepeatedPtrField<v1::Member>& members);

// [{host, ranks, workers, shards, only_here}]
nlohmann::ordered_json HostsToJson(const std::vector<HostOfJob>& hosts);
// A table, and a sentence on the loss of a host. Empty where there are none.
std::string DrawHosts(const std::vector<HostOfJob>& hosts, OnLoss on_loss, int copies);

}  // namespace shardmesh
