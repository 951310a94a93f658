#include "bench/collectives/host_links.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/collectives/host_groups_job.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr HostWay kWays[] = {HostWay::kRaw, HostWay::kGloo, HostWay::kClear, HostWay::kTls};
constexpr int kWarmUps = 1;

const char* NameOf(HostWay way) { return kHostWayNames[static_cast<int>(way)]; }

// One link's; `processor`: processor seconds of both ranks, by way and round.
absl::Status Measure(HostGroupsJob& job, int wanted, Rounds& rounds,
                     std::map<HostWay, std::vector<double>>& processor) {
  for (const HostWay way : kWays) {
    rounds.Add(NameOf(way), [&job, &processor, way]() -> absl::StatusOr<double> {
      const double before = job.ProcessorSeconds();
      ASSIGN_OR_RETURN(const double passed, job.Run(HostGroupsJob::kBulk, way));
      processor[way].push_back(job.ProcessorSeconds() - before);
      return passed;
    });
  }
  RETURN_IF_ERROR(rounds.Measure(kWarmUps, wanted));
  for (auto& [way, seconds] : processor) seconds.erase(seconds.begin(), seconds.begin() + kWarmUps);
  return absl::OkStatus();
}

}  // namespace

absl::Status AddLinkRows(TwoNamespaces& hosts, int64_t bytes, int rounds_wanted, Report& report) {
  ASSIGN_OR_RETURN(const auto job, HostGroupsJob::Create(bytes, {hosts.name(0), TwoNamespaces::kAddresses[0]},
                                                         {hosts.name(1), TwoNamespaces::kAddresses[1]}));
  for (const HostWay way : kWays) {
    RETURN_IF_ERROR(Annotate(job->Run(HostGroupsJob::kCheck, way).status(), absl::StrCat("verifying ", NameOf(way))));
  }
  for (const int link : kLinks) {
    const std::string speed = link == 0 ? "link without a limit" : absl::StrCat("link of ", link, " MB/s");
    const std::string what = absl::StrCat(" of ", bytes >> 20, " MiB each way, ", speed);
    const Goal goal = link == 0 ? Goal() : Goal::AtLeast(kTlsOfRaw);
    if (const absl::Status limited = hosts.Limit(link); !limited.ok()) {
      report.Add({absl::StrCat("TLS / raw TCP, ms", what), 0, 0, {}, goal, std::string(limited.message())});
      continue;
    }
    Rounds rounds;
    std::map<HostWay, std::vector<double>> processor;
    RETURN_IF_ERROR(Measure(*job, rounds_wanted, rounds, processor));
    for (const HostWay way : {HostWay::kTls, HostWay::kClear, HostWay::kGloo}) {
      report.Add(Compare(absl::StrCat(NameOf(way), " / raw TCP, ms", what), rounds.seconds(NameOf(way)),
                         rounds.seconds(NameOf(HostWay::kRaw)), 1e3, way == HostWay::kTls ? goal : Goal()));
      report.Add(CompareCost(absl::StrCat(NameOf(way), ", times raw TCP, processor seconds for a GB, ", speed),
                             processor[way], processor[HostWay::kRaw], 1e9 / (2 * static_cast<double>(bytes))));
    }
  }
  return hosts.Limit(0);
}

}  // namespace shardmesh::bench
