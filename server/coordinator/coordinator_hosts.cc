// What tells the coordinator that a whole host is lost.
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

constexpr int kHostPatience = 2;    // part of the heartbeat time-out: workers are heard twice in it, or more often
constexpr int kPartOfFarewell = 4;  // of the host_timeout: what is said in it by workers that end next

}  // namespace

// The lead of a host speaks for it, so other hosts cannot tell whether it died alone. A member of the host that lives sees
// the death itself, and says so at once. Those that say nothing for a while are taken to have died with it: else the job
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

// A node's connection ends with its process; what is lost with the host's network ends later than the time-out.
void Coordinator::HangUp(const std::string& name, const Heard& last, absl::Time now) {
  const Worker* const worker = FindWorker(name);
  if (worker == nullptr || !IsAsAt(*worker, last, now)) return;
  const std::string& host = worker->record.identity.host_id;
  if (hung_up_.emplace(host, now).second)
    events_.push_back(absl::StrCat("event=node_hung_up host=\"", absl::CHexEscape(host), "\""));
}

std::map<std::string, Coordinator::Ending> Coordinator::TakeSilentHosts(bool steady, absl::Time now) {
  std::map<std::string, Ending> lost;
  for (auto host = hung_up_.begin(); host != hung_up_.end();) {
    const auto& [id, since] = *host;
    std::map<std::string, Ending> silent;
    bool heard = false;
    for (const auto& [name, worker] : state_.workers) {
      if (worker.record.identity.host_id != id || worker.record.state != WorkerState::kAlive) continue;
      heard = heard || worker.last_heartbeat > since + options_.host_timeout / kPartOfFarewell;
      const std::string silence = absl::FormatDuration(now - worker.last_heartbeat);
      silent[name] = {absl::StrCat("was silent for ", silence, ", and the node of its host had hung up"),
                      absl::StrCat("silent_for=", silence, " node_hung_up=true")};
    }
    const bool late = steady && now - since > options_.host_timeout;
    if (late && !heard) lost.merge(silent);
    host = heard || late || silent.empty() ? hung_up_.erase(host) : std::next(host);
  }
  return lost;
}

absl::Status Coordinator::TickHosts(absl::Time now) {
  const bool steady = now - last_hosts_tick_ < options_.host_timeout / 2;
  last_hosts_tick_ = now;
  if (hung_up_.empty()) return absl::OkStatus();
  const std::map<std::string, Ending> lost = TakeSilentHosts(steady, now);
  if (lost.empty()) return absl::OkStatus();
  Transaction transaction = NewTransaction();
  MarkDead(transaction, lost, now);
  AssignWaitingJobs(transaction, now);
  return Commit(transaction);
}

}  // namespace shardmesh
