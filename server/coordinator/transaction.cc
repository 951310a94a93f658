#include <algorithm>
#include <utility>

#include "core/base/status.h"
#include "server/coordinator/state.h"

namespace shardmesh {

Transaction::Transaction(CoordinatorState& state, Store& store, std::vector<std::string>& events)
    : state_(state), store_(store), committed_events_(events), old_epoch_floor_(state.epoch_floor) {}

Transaction::~Transaction() {
  if (!ended_) RollBack();
}

void ReadyRanks::Add(int64_t epoch, size_t num_ranks, size_t rank) {
  if (epoch != epoch_ || ready_.size() != num_ranks) {
    epoch_ = epoch;
    count_ = 0;
    ready_.assign(num_ranks, false);
  }
  count_ += !ready_[rank];
  ready_[rank] = true;
}

void ReadShards::Add(int64_t epoch, size_t num_ranks, size_t rank, Said said) {
  if (epoch != epoch_ || said_.size() != num_ranks) {
    epoch_ = epoch;
    count_ = 0;
    said_.assign(num_ranks, {});
  }
  count_ += said_[rank].empty();
  said_[rank] = std::move(said);
}

void Transaction::SaveJob(const std::string& name) {
  if (old_jobs_.count(name) > 0) return;
  const auto found = state_.jobs.find(name);
  old_jobs_.emplace(name, found == state_.jobs.end() ? std::nullopt : std::make_optional(found->second));
  state_.places.Touch(name);
}

void Transaction::SaveWorker(const std::string& name) {
  if (old_workers_.count(name) > 0) return;
  const auto found = state_.workers.find(name);
  old_workers_.emplace(name, found == state_.workers.end() ? std::nullopt : std::make_optional(found->second));
}

Job& Transaction::MutableJob(const std::string& name) {
  SaveJob(name);
  return state_.jobs.at(name);
}

Worker& Transaction::MutableWorker(const std::string& name) {
  SaveWorker(name);
  return state_.workers.at(name);
}

void Transaction::PutJob(Job job) {
  const std::string name = job.record.name;
  SaveJob(name);
  state_.jobs[name] = std::move(job);
}

void Transaction::PutWorker(Worker worker) {
  const std::string name = worker.record.identity.name;
  SaveWorker(name);
  state_.workers[name] = std::move(worker);
}

void Transaction::DeleteJob(const std::string& name) {
  SaveJob(name);
  UseUpEpoch(state_.jobs.at(name).record.epoch);
  state_.jobs.erase(name);
}

void Transaction::UseUpEpoch(int64_t epoch) { state_.epoch_floor = std::max(state_.epoch_floor, epoch); }

void Transaction::DeleteWorker(const std::string& name) {
  SaveWorker(name);
  state_.workers.erase(name);
  ++state_.changes;  // also if it comes back: as another object
}

StoreBatch Transaction::Batch() const {
  StoreBatch batch;
  for (const auto& [name, old] : old_workers_) {
    const auto now = state_.workers.find(name);
    if (now == state_.workers.end()) {
      if (old.has_value()) batch.delete_workers.push_back(name);
    } else if (!old.has_value() || !(old->record == now->second.record)) {
      batch.put_workers.push_back(now->second.record);
    }
  }
  for (const auto& [name, old] : old_jobs_) {
    const auto now = state_.jobs.find(name);
    if (now == state_.jobs.end()) {
      if (old.has_value()) batch.delete_jobs.push_back(name);
      continue;
    }
    const bool made = !old.has_value() || old->defined != now->second.defined;
    if (made) batch.put_specs[name] = now->second.defined->Serialize();
    if (!old.has_value() || old->progress_unsaved || !(old->record == now->second.record)) {
      batch.put_jobs.push_back(now->second.record);
    }
  }
  if (state_.epoch_floor != old_epoch_floor_) batch.epoch_floor = state_.epoch_floor;
  return batch;
}

bool Transaction::ChangesAJob() const {
  return std::any_of(old_jobs_.begin(), old_jobs_.end(), [&](const auto& named) {
    const auto& [name, old] = named;
    const auto now = state_.jobs.find(name);
    if (!old.has_value() || now == state_.jobs.end()) return true;
    return !(old->record == now->second.record) || old->definition != now->second.definition ||
           old->next != now->second.next;
  });
}

absl::Status Transaction::Commit() {
  const StoreBatch batch = Batch();
  if (!batch.empty()) {
    if (absl::Status written = store_.Write(batch); !written.ok()) {
      RollBack();
      return written;
    }
  }
  if (ChangesAJob()) ++state_.changes;
  for (const JobRecord& job : batch.put_jobs) state_.jobs.at(job.name).progress_unsaved = false;
  committed_events_.insert(committed_events_.end(), events_.begin(), events_.end());
  if (!old_jobs_.empty()) state_.places.Settle(state_.jobs);
  ended_ = true;
  return absl::OkStatus();
}

void Transaction::RollBack() {
  for (auto& [name, old] : old_jobs_) {
    if (old.has_value()) {
      state_.jobs[name] = *std::move(old);
    } else {
      state_.jobs.erase(name);
    }
  }
  for (auto& [name, old] : old_workers_) {
    if (old.has_value()) {
      state_.workers[name] = *std::move(old);
    } else {
      state_.workers.erase(name);
    }
  }
  state_.epoch_floor = old_epoch_floor_;
  if (!old_jobs_.empty()) state_.places.Settle(state_.jobs);
  ended_ = true;
}

}  // namespace shardmesh
