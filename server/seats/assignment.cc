#include "server/seats/assignment.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

// Workers of one host that may be in one job: on CUDA devices, which come first, or on processors.
struct Kind {
  bool on_processors = false;
  std::string host;
  friend bool operator<(const Kind& a, const Kind& b) {
    return std::tie(a.on_processors, a.host) < std::tie(b.on_processors, b.host);
  }
};
using Hosts = std::map<Kind, std::vector<Candidate>>;

constexpr int kHostsNamed = 3;

// `refusal`: why hosts that would do together are not asked; empty: there are none.
std::string WaitingFor(const Demand& demand, const Hosts& hosts, bool spanning, int64_t passed_over,
                       const std::string& refusal) {
  std::string text = absl::StrCat(demand.num_ranks, " live worker", demand.num_ranks == 1 ? "" : "s", " on one host",
                                  spanning ? ", or evenly on several with group addresses" : "", "; ");
  const bool kinds = passed_over > 0 || (!hosts.empty() && !hosts.begin()->first.on_processors);
  std::vector<std::pair<size_t, std::string>> counts;
  for (const auto& [kind, workers] : hosts) {
    const char* const where = kind.on_processors ? " on processors" : " on CUDA devices";
    counts.emplace_back(workers.size(), absl::StrCat("host ", absl::CHexEscape(kind.host), " has ", workers.size(),
                                                     kinds ? where : ""));
  }
  std::stable_sort(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (size_t i = 0; i < counts.size() && i < kHostsNamed; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", counts[i].second);
  }
  if (counts.size() > kHostsNamed) absl::StrAppend(&text, ", others have no more");
  if (counts.empty()) absl::StrAppend(&text, "none is there", kinds ? " on processors" : "");
  if (passed_over > 0) {
    absl::StrAppend(&text, "; ", passed_over, " on CUDA devices are not asked: ", demand.refusal(1, true));
  }
  if (!refusal.empty()) absl::StrAppend(&text, "; several hosts together are not asked: ", refusal);
  return text;
}

struct HostChoice {
  int64_t load = 0;  // jobs that its chosen workers serve
  const std::vector<Candidate>* workers = nullptr;
};

// The `num_hosts` best hosts for `per_host` workers each, all on CUDA devices or none; empty: there are not so many.
std::vector<HostChoice> BestHosts(const Hosts& hosts, bool on_devices, int64_t num_hosts, int64_t per_host) {
  std::vector<HostChoice> choices;
  for (const auto& [kind, workers] : hosts) {
    if (kind.on_processors == on_devices || static_cast<int64_t>(workers.size()) < per_host) continue;
    HostChoice choice{0, &workers};
    for (int64_t i = 0; i < per_host; ++i) choice.load += workers[i].num_jobs;
    choices.push_back(choice);
  }
  if (static_cast<int64_t>(choices.size()) < num_hosts) return {};
  std::stable_sort(choices.begin(), choices.end(),
                   [](const HostChoice& a, const HostChoice& b) { return a.load < b.load; });
  choices.resize(num_hosts);
  return choices;
}

// Candidates by host, the best first.
struct Fleet {
  Hosts hosts;     // that may be asked for a job on one host
  Hosts spanning;  // that other hosts reach
};

// Takes members on so many hosts of one kind, if there are enough and the job can be there. The refusal, if only that
// is in the way.
std::string TakeMembers(const Demand& demand, const Fleet& fleet, bool on_devices, int64_t num_hosts, Choice& choice) {
  const int64_t per_host = demand.num_ranks / num_hosts;
  const Hosts& hosts = num_hosts == 1 ? fleet.hosts : fleet.spanning;
  const std::vector<HostChoice> best = BestHosts(hosts, on_devices, num_hosts, per_host);
  const std::string& refusal = demand.refusal(num_hosts, on_devices);
  if (best.empty() || !refusal.empty()) return best.empty() ? "" : refusal;
  for (const HostChoice& host : best) {
    for (int64_t i = 0; i < per_host; ++i) choice.members.push_back(*(*host.workers)[i].worker);
  }
  choice.on_devices = on_devices;
  return "";
}

}  // namespace

Choice ChooseMembers(const Demand& demand, std::vector<Candidate> candidates) {
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.num_jobs, a.worker->name) < std::tie(b.num_jobs, b.worker->name);
  });
  Choice choice;
  Fleet fleet;
  bool several = false;  // hosts may be asked together
  for (const Candidate& candidate : candidates) {
    const WorkerTraits& traits = candidate.traits;
    const Kind kind{!traits.has_device, candidate.worker->host_id};
    if (traits.spans_hosts) {
      fleet.spanning[kind].push_back(candidate);
      several = several || demand.refusal(2, traits.has_device).empty();
    }
    const bool passed_over = traits.has_device && !demand.refusal(1, true).empty();
    choice.passed_over += passed_over;
    if (!passed_over) fleet.hosts[kind].push_back(candidate);
  }
  std::string refusal;
  for (const bool on_devices : {true, false}) {
    for (const int64_t num_hosts : demand.host_counts) {
      std::string only = TakeMembers(demand, fleet, on_devices, num_hosts, choice);
      if (!choice.members.empty()) return choice;
      if (refusal.empty() && !(on_devices && choice.passed_over > 0)) refusal = std::move(only);
    }
  }
  choice.waiting_for = WaitingFor(demand, fleet.hosts, several, choice.passed_over, refusal);
  return choice;
}

}  // namespace shardmesh
