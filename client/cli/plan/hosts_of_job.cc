#include "client/cli/plan/hosts_of_job.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/base/table.h"

namespace shardmesh {

std::vector<HostOfJob> HostsOfJob(const google::protobuf::RepeatedPtrField<v1::Member>& members) {
  std::vector<HostOfJob> hosts;
  std::map<int, std::set<std::string>> hosts_of_shard;
  for (const v1::Member& member : members) {
    auto host = std::find_if(hosts.begin(), hosts.end(),
                             [&](const HostOfJob& one) { return one.host == member.host_id(); });
    if (host == hosts.end()) host = hosts.insert(hosts.end(), {member.host_id(), {}, {}, {}, {}});
    host->ranks.push_back(member.rank());
    host->workers.push_back(member.worker());
    host->shards.insert(member.shard());
    hosts_of_shard[member.shard()].insert(member.host_id());
  }
  for (HostOfJob& host : hosts) {
    for (const int shard : host.shards) {
      if (hosts_of_shard[shard].size() == 1) host.only_here.insert(shard);
    }
  }
  return hosts;
}

nlohmann::ordered_json HostsToJson(const std::vector<HostOfJob>& hosts) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const HostOfJob& host : hosts) {
    all.push_back({{"host", host.host},
                   {"ranks", host.ranks},
                   {"workers", host.workers},
                   {"shards", host.shards},
                   {"only_here", host.only_here}});
  }
  return all;
}

std::string DrawHosts(const std::vector<HostOfJob>& hosts, OnLoss on_loss, int copies) {
  if (hosts.empty()) return "";
  Table table({"host", "ranks", "workers", "shards", "no replica elsewhere"});
  bool survives = true;
  for (const HostOfJob& host : hosts) {
    table.AddRow({host.host, absl::StrJoin(host.ranks, ","), absl::StrJoin(host.workers, ","),
                  absl::StrJoin(host.shards, ","), host.only_here.empty() ? "-" : absl::StrJoin(host.only_here, ",")});
    survives = survives && host.only_here.empty();
  }
  if (!survives && copies > 1 && hosts.size() > 1) {
    return absl::StrCat(table.ToString(),
                        "The next host keeps a copy of each shard: the job goes back to the newest step "
                        "of which it has all, if any one of\nthese hosts is lost.\n");
  }
  const std::string loss =
      survives ? "The others have a replica of each shard if any one of these hosts is lost: the job goes on if it can "
                 "re-form\n"
                 "(shardctl support).\n"
               : absl::StrCat(on_loss == OnLoss::kFail ? "The job fails" : "The job goes back to its newest checkpoint",
                              " if it loses a host that has shards without a replica elsewhere.\nReplicas come on "
                              "different hosts where the mesh names its replicate dimension first, as ddp=2,fsdp=4, and "
                              "there are\nworkers on so many hosts.\n");
  return absl::StrCat(table.ToString(), loss);
}

}  // namespace shardmesh
