// What tells the coordinator that a whole host is lost.
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

constexpr int kHostPatience = 2;    // part of the heartbeat time-out: who is there is heard more often (hosts.proto)
constexpr int kPartNotCounted = 4;  // of the host_timeout

}  // namespace

// The lead of a host speaks for it, so other hosts cannot tell whether it died alone. A member of its host that is there
// sees the death itself, and says so at once. Those that say nothing for a while are taken to have died with it: else the job
// would be given to them once more, and wait until they are silent for the time-out.
bool Coordinator::AwaitsHost(Transaction& transaction, const MemberReport& report, const WorkerIdentity& reporter,
                             absl::Time now) {
  Job& job = state_.jobs.at(report.job);
  const std::string host = job.record.members[report.lost_rank].worker.host_id;
  if (host == reporter.host_id) return false;
  if (job.in_doubt.epoch != job.record.epoch) job.in_doubt = {job.record.epoch, {}};
  const absl::Time since = job.in_doubt.since.emplace(host, now).first->second;
  const WorkerIdentity& lost = job.record.members[report.lost_rank].worker;
  std::vector<std::string> unheard;
  for (const auto& [name, worker] : state_.workers) {
    if (worker.record.identity.host_id != host || SameIncarnation(worker.record.identity, lost)) continue;
    if (!IsThere(worker, now) || worker.last_heartbeat >= since) continue;
    // Who died with its host has been silent since then: the report may come much later.
    if (now - worker.last_heartbeat < options_.heartbeat_timeout / kHostPatience) return true;
    unheard.push_back(name);
  }
  for (const std::string& name : unheard) transaction.MutableWorker(name).doubted = true;
  return false;
}

void Coordinator::HearInCall(const std::string& worker, uint64_t call) {
  const Worker* const there = FindWorker(worker);
  if (there != nullptr) node_calls_[there->record.identity.host_id] = {call, std::nullopt};
}

// It ends with the node's process. A node that is there begins another one, or its workers call themselves.
void Coordinator::EndCall(uint64_t call, absl::Time now) {
  for (auto& [host, newest] : node_calls_) {
    if (newest.number == call) newest.ended = now;
  }
}

std::map<std::string, absl::Time> Coordinator::TakeLateHosts(bool steady, absl::Time now) {
  std::map<std::string, absl::Time> late;
  for (auto host = node_calls_.begin(); host != node_calls_.end();) {
    std::optional<absl::Time>& ended = host->second.ended;
    if (ended.has_value() && !steady) ended = now;
    if (ended.has_value() && now - *ended > options_.host_timeout) {
      late.emplace(host->first, *ended);
      host = node_calls_.erase(host);
    } else {
      ++host;
    }
  }
  return late;
}

absl::Status Coordinator::TickHosts(absl::Time now) {
  const bool steady = now - last_hosts_tick_ < options_.host_timeout / 2;
  last_hosts_tick_ = now;
  const std::map<std::string, absl::Time> late = TakeLateHosts(steady, now);
  if (late.empty()) return absl::OkStatus();
  std::set<std::string> heard;
  std::map<std::string, std::map<std::string, Ending>> silent;  // by host
  for (const auto& [name, worker] : state_.workers) {
    const auto host = late.find(worker.record.identity.host_id);
    if (host == late.end() || worker.record.state != WorkerState::kAlive || heard.count(host->first) > 0) continue;
    if (worker.last_heartbeat > host->second + options_.host_timeout / kPartNotCounted) {
      heard.insert(host->first);
      silent.erase(host->first);
      continue;
    }
    const std::string silence = absl::FormatDuration(now - worker.last_heartbeat);
    silent[host->first][name] = {absl::StrCat("was silent for ", silence, ", and its node, which relayed it, is gone"),
                                 absl::StrCat("silent_for=", silence, " node_gone=true")};
  }
  std::map<std::string, Ending> lost;
  for (auto& [host, workers] : silent) lost.merge(workers);
  if (lost.empty()) return absl::OkStatus();
  Transaction transaction = NewTransaction();
  MarkDead(transaction, lost, now);
  AssignWaitingJobs(transaction, now);
  return Commit(transaction);
}

}  // namespace shardmesh
