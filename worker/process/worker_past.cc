// What Worker has of epochs that ended, or are about to: versions that readers may still ask for.
#include <algorithm>
#include <utility>

#include "worker/process/worker.h"

namespace shardmesh {

bool Worker::Moves(const Entry& entry) {
  return (entry.assignment.has_from() || entry.assignment.has_back()) && !entry.resumed &&
         (entry.state == v1::MEMBER_STATE_PREPARING || entry.state == v1::MEMBER_STATE_PREPARED);
}

absl::StatusOr<std::shared_ptr<JobShard>> Worker::FindToRead(const std::string& job) const {
  {
    MutexLock lock(mu_);
    const auto it = jobs_.find(job);
    const Entry* const before = it != jobs_.end() && Moves(*it->second) ? it->second->before.get() : nullptr;
    if (before != nullptr && before->shard != nullptr) return before->shard;
  }
  return Find(job);
}

absl::StatusOr<std::shared_ptr<JobShard>> Worker::FindLeased(const std::string& job, uint64_t lease) const {
  {
    MutexLock lock(mu_);
    const auto it = jobs_.find(job);
    std::vector<std::shared_ptr<Entry>> all = past_;
    if (it != jobs_.end()) all.insert(all.end(), {it->second, it->second->before});
    for (const std::shared_ptr<Entry>& entry : all) {
      if (entry == nullptr || entry->shard == nullptr || entry->assignment.spec().name() != job) continue;
      if (entry->shard->leases().Knows(lease)) return entry->shard;
    }
  }
  return FindToRead(job);
}

std::vector<std::shared_ptr<JobShard>> Worker::Past(const std::string& job) const {
  std::vector<std::shared_ptr<JobShard>> past;
  MutexLock lock(mu_);
  for (const std::shared_ptr<Entry>& entry : past_) {
    if (entry->assignment.spec().name() == job) past.push_back(entry->shard);
  }
  return past;
}

void Worker::KeepLeased(const std::shared_ptr<Entry>& entry) {
  if (entry->shard != nullptr && entry->shard->leases().Any()) past_.push_back(entry);
}

bool Worker::LeaveVersions(const Entry& entry) {
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    const auto past = std::find_if(past_.begin(), past_.end(), [&](const auto& one) { return one.get() == &entry; });
    if (past != past_.end()) shard = entry.shard;
  }
  if (shard == nullptr) return false;
  shard->epoch_end().StopEngine();
  shard->memory().GiveBack();
  return true;
}

void Worker::SweepPast(bool all) {
  std::vector<std::shared_ptr<Entry>> gone;
  {
    MutexLock lock(mu_);
    const auto over = std::stable_partition(past_.begin(), past_.end(), [all](const std::shared_ptr<Entry>& entry) {
      return !all && entry->shard->leases().Any();
    });
    gone.assign(over, past_.end());
    past_.erase(over, past_.end());
  }
  for (const std::shared_ptr<Entry>& entry : gone) Close(entry);
}

}  // namespace shardmesh
