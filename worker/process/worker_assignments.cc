// What Worker makes of the coordinator's assignments: what it holds on, gives up, and begins to prepare.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/thread.h"
#include "worker/process/worker.h"

namespace shardmesh {

void Worker::BeginPreparing(const std::shared_ptr<Entry>& entry) {
  absl::StatusOr<std::thread> thread = StartThread("the preparation of a job", [this, entry] { Prepare(entry); });
  if (thread.ok()) {
    entry->preparing = *std::move(thread);
    return;
  }
  entry->state = v1::MEMBER_STATE_FAILED;  // nobody else has it yet
  entry->error = absl::StrCat("worker ", options_.name, " could not prepare it: ", thread.status().message());
  spdlog::error("event=job_failed job={} epoch={} error=\"{}\"", entry->assignment.spec().name(),
                entry->assignment.epoch(), thread.status().ToString());
}

// What an entry was to go on from is the job's, not its own.
void Worker::Reconcile(const std::vector<v1::Assignment>& assignments) {
  std::vector<std::shared_ptr<Entry>> gone;
  std::set<std::string> named;
  {
    MutexLock lock(mu_);
    Entries keep, keep_staged;
    for (const v1::Assignment& assignment : assignments) {
      const bool again = keep.count(assignment.spec().name()) > 0;  // said twice: the first counts
      if (!assignment.staged() && !again) Keep(assignment, keep, keep_staged, gone);
    }
    for (const v1::Assignment& assignment : assignments) {
      if (assignment.staged()) KeepStaged(assignment, keep, keep_staged);
    }
    for (auto& [name, entry] : jobs_) {
      gone.push_back(entry);
      DropOlder(*entry, gone);
    }
    for (auto& [name, entry] : staged_) {
      gone.push_back(entry);
      entry->before = nullptr;
    }
    jobs_ = std::move(keep);
    staged_ = std::move(keep_staged);
    for (const std::shared_ptr<Entry>& entry : gone) KeepLeased(entry);
    DropCopies(assignments);
    named = PeerAddresses();
  }
  if (options_.peers_named) options_.peers_named(named);
  for (const std::shared_ptr<Entry>& entry : gone) {
    spdlog::info("event=job_closed job={} epoch={}", entry->assignment.spec().name(), entry->assignment.epoch());
    Close(entry);
  }
}

std::set<std::string> Worker::PeerAddresses() const {
  std::set<std::string> addresses;
  const auto add = [&](const auto& peers) {
    for (const v1::Peer& peer : peers) addresses.insert(peer.address());
  };
  for (const Entries* all : {&jobs_, &staged_}) {
    for (const auto& [name, newest] : *all) {
      for (const Entry* entry = newest.get(); entry != nullptr; entry = entry->before.get()) {
        add(entry->assignment.peers());
        add(entry->assignment.from().departing());
        add(entry->assignment.back().holders());
      }
    }
  }
  return addresses;
}

void Worker::Keep(const v1::Assignment& assignment, Entries& keep, Entries& keep_staged,
                  std::vector<std::shared_ptr<Entry>>& gone) {
  const std::string& name = assignment.spec().name();
  const auto it = jobs_.find(name), staged = staged_.find(name);
  if (assignment.has_from() && assignment.from().epoch() == assignment.epoch()) {
    if (std::shared_ptr<Entry> held = it == jobs_.end() ? nullptr : TakeHeld(assignment.epoch(), it->second)) {
      DropOlder(*held, gone);
      keep[name] = std::move(held);
      if (it->second == nullptr) jobs_.erase(it);
    }
    KeepLeaving(assignment, keep, keep_staged);
    return;
  }
  if (staged != staged_.end() && staged->second->assignment.epoch() == assignment.epoch()) {
    const std::shared_ptr<Entry>& entry = keep[name] = staged->second;
    entry->cutover.store(true);
    staged_.erase(staged);
    if (it != jobs_.end() && it->second == entry->before) jobs_.erase(it);
    if (entry->before != nullptr) DropOlder(*entry->before, gone);
    if (!assignment.has_from()) DropOlder(*entry, gone);
    return;
  }
  const Entry* const there = it == jobs_.end() ? nullptr : it->second.get();
  const bool same = there != nullptr && there->assignment.epoch() == assignment.epoch();
  // It cut over before the coordinator's answer to an older question came.
  const bool later =
      there != nullptr && there->before != nullptr && there->before->assignment.epoch() == assignment.epoch();
  if (same || later) {
    if (same && !assignment.has_from()) DropOlder(*it->second, gone);
    if (same && assignment.back().use()) it->second->use_loaded.store(true);
    keep.insert(jobs_.extract(it));
    return;
  }
  auto entry = std::make_shared<Entry>();
  entry->assignment = assignment;
  if (it != jobs_.end()) entry->before = TakeBefore(assignment, it->second);
  if (entry->before != nullptr) DropOlder(*entry->before, gone);
  if (it != jobs_.end() && it->second == nullptr) jobs_.erase(it);
  BeginPreparing(entry);
  keep[name] = entry;
}

}  // namespace shardmesh
