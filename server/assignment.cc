#include "server/assignment.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

using Hosts = std::map<std::string, std::vector<Candidate>>;

constexpr int kHostsNamed = 3;

std::string WaitingFor(int64_t num_ranks, const Hosts& hosts) {
  std::string text = absl::StrCat(num_ranks, " live worker", num_ranks == 1 ? "" : "s", " on one host; ");
  if (hosts.empty()) return absl::StrCat(text, "none is there");
  std::vector<std::pair<size_t, std::string>> counts;
  for (const auto& [host, workers] : hosts) counts.emplace_back(workers.size(), host);
  std::stable_sort(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (size_t i = 0; i < counts.size() && i < kHostsNamed; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", "host ", absl::CHexEscape(counts[i].second), " has ", counts[i].first);
  }
  if (counts.size() > kHostsNamed) absl::StrAppend(&text, ", ", counts.size() - kHostsNamed, " more hosts have fewer");
  return text;
}

}  // namespace

Choice ChooseMembers(int64_t num_ranks, std::vector<Candidate> candidates) {
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.num_jobs, a.worker->name) < std::tie(b.num_jobs, b.worker->name);
  });
  Hosts hosts;
  for (const Candidate& candidate : candidates) hosts[candidate.worker->host_id].push_back(candidate);
  const std::vector<Candidate>* best = nullptr;
  int64_t best_load = 0;
  for (const auto& [host, workers] : hosts) {
    if (static_cast<int64_t>(workers.size()) < num_ranks) continue;
    int64_t load = 0;
    for (int64_t i = 0; i < num_ranks; ++i) load += workers[i].num_jobs;
    if (best != nullptr && load >= best_load) continue;
    best = &workers;
    best_load = load;
  }
  Choice choice;
  if (best == nullptr) {
    choice.waiting_for = WaitingFor(num_ranks, hosts);
    return choice;
  }
  for (int64_t i = 0; i < num_ranks; ++i) choice.members.push_back(*(*best)[i].worker);
  return choice;
}

}  // namespace shardmesh
