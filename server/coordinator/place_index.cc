#include "server/coordinator/place_index.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "server/coordinator/state.h"

namespace shardmesh {
namespace {

// `visit(place, worker)` for everybody that a job has, or had when it came into the index.
template <typename Visit>
void ForEach(const Job* job, const SharedList<MemberRecord>& members, const SharedList<MemberRecord>& others,
             const NextMesh* next, const Visit& visit) {
  const auto each = [&](const auto& list, Place::Kind kind) {
    int32_t index = 0;
    for (const MemberRecord& member : list) visit(Place{job, kind, index++, member.worker.incarnation}, member.worker);
  };
  each(members, Place::kMember);
  each(others, Place::kOther);
  if (next == nullptr) return;
  each(next->members, Place::kNext);
  each(next->departing, Place::kDeparting);
}

bool Before(const Place& a, const Place& b) {
  if (a.job == b.job) return a.kind < b.kind;
  return a.job->record.name < b.job->record.name;
}

}  // namespace

void PlaceIndex::Settle(const Jobs& jobs) {
  LookAgain(jobs);
  touched_.clear();
}

const std::vector<Place>& PlaceIndex::Of(const Jobs& jobs, const std::string& worker) {
  static const std::vector<Place>* const kNone = new std::vector<Place>();
  LookAgain(jobs);
  const auto found = places_.find(worker);
  return found == places_.end() ? *kNone : found->second;
}

const Told& PlaceIndex::ToldOf(const Jobs& jobs, const Job& job) {
  LookAgain(jobs);
  return entries_.at(job.record.name).told;
}

// All that is gone goes first: its jobs may not be there any more.
void PlaceIndex::LookAgain(const Jobs& jobs) {
  std::vector<const std::string*> changed;
  for (const std::string& name : touched_) {
    const auto job = jobs.find(name);
    const auto entry = entries_.find(name);
    if (entry != entries_.end() && job != jobs.end() && entry->second.job == &job->second &&
        entry->second.members.SharesWith(job->second.record.members) &&
        entry->second.others.SharesWith(job->second.record.others) && entry->second.next == job->second.next) {
      continue;
    }
    if (entry != entries_.end()) {
      Remove(entry->second);
      entries_.erase(entry);
    }
    if (job != jobs.end()) changed.push_back(&name);
  }
  for (const std::string* name : changed) Add(*name, jobs.at(*name));
}

void PlaceIndex::Add(const std::string& name, const Job& job) {
  const JobRecord& record = job.record;
  ForEach(&job, record.members, record.others, job.next.get(),
          [&](const Place& place, const WorkerIdentity& worker) { Put(place, worker.name); });
  std::vector<WorkerIdentity> peers;
  std::vector<int32_t> was;
  peers.reserve(record.members.size());
  for (const MemberRecord& member : record.members) {
    peers.push_back(member.worker);
    was.push_back(member.was);
  }
  entries_[name] = {&job, record.members, record.others, job.next, {std::move(peers), std::move(was)}};
}

void PlaceIndex::Remove(Entry& entry) {
  ForEach(entry.job, entry.members, entry.others, entry.next.get(),
          [&](const Place&, const WorkerIdentity& worker) { RemovePlaces(entry.job, worker.name); });
}

void PlaceIndex::Put(const Place& place, const std::string& worker) {
  std::vector<Place>& places = places_[worker];
  places.insert(std::upper_bound(places.begin(), places.end(), place, Before), place);
}

void PlaceIndex::RemovePlaces(const Job* job, const std::string& worker) {
  const auto found = places_.find(worker);
  if (found == places_.end()) return;
  std::vector<Place>& places = found->second;
  places.erase(std::remove_if(places.begin(), places.end(), [&](const Place& place) { return place.job == job; }),
               places.end());
  if (places.empty()) places_.erase(found);
}

}  // namespace shardmesh
