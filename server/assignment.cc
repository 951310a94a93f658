#include "server/assignment.h"

#include <algorithm>
#include <map>
#include <tuple>

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

std::string WaitingFor(const Demand& demand, const Hosts& hosts, bool spanning, int64_t passed_over) {
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
  if (passed_over == 0) return text;
  return absl::StrCat(text, "; ", passed_over, " on CUDA devices are not asked: ", demand.refused_by_devices);
}

struct HostChoice {
  bool on_processors = false;
  int64_t load = 0;  // jobs that its chosen workers serve
  const std::vector<Candidate>* workers = nullptr;
};

// The `num_hosts` best hosts for `per_host` workers each; empty: there are not so many.
std::vector<HostChoice> BestHosts(const Hosts& hosts, int64_t num_hosts, int64_t per_host) {
  std::vector<HostChoice> choices;
  for (const auto& [kind, workers] : hosts) {
    if (static_cast<int64_t>(workers.size()) < per_host) continue;
    HostChoice choice{kind.on_processors, 0, &workers};
    for (int64_t i = 0; i < per_host; ++i) choice.load += workers[i].num_jobs;
    choices.push_back(choice);
  }
  if (static_cast<int64_t>(choices.size()) < num_hosts) return {};
  std::stable_sort(choices.begin(), choices.end(), [](const HostChoice& a, const HostChoice& b) {
    return std::tie(a.on_processors, a.load) < std::tie(b.on_processors, b.load);
  });
  choices.resize(num_hosts);
  return choices;
}

}  // namespace

Choice ChooseMembers(const Demand& demand, std::vector<Candidate> candidates) {
  const int64_t num_ranks = demand.num_ranks;
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.num_jobs, a.worker->name) < std::tie(b.num_jobs, b.worker->name);
  });
  Choice choice;
  Hosts hosts, spanning;
  for (const Candidate& candidate : candidates) {
    const WorkerTraits& traits = candidate.traits;
    if (traits.has_device && !demand.refused_by_devices.empty()) {
      ++choice.passed_over;
      continue;
    }
    const Kind kind{!traits.has_device, candidate.worker->host_id};
    hosts[kind].push_back(candidate);
    if (traits.spans_hosts && kind.on_processors) spanning[kind].push_back(candidate);
  }
  for (int64_t num_hosts = 1; num_hosts <= num_ranks && choice.members.empty(); ++num_hosts) {
    if (num_ranks % num_hosts != 0) continue;
    const int64_t per_host = num_ranks / num_hosts;
    for (const HostChoice& host : BestHosts(num_hosts == 1 ? hosts : spanning, num_hosts, per_host)) {
      for (int64_t i = 0; i < per_host; ++i) choice.members.push_back(*(*host.workers)[i].worker);
      choice.on_devices = !host.on_processors;
    }
  }
  if (choice.members.empty()) choice.waiting_for = WaitingFor(demand, hosts, !spanning.empty(), choice.passed_over);
  return choice;
}

}  // namespace shardmesh
