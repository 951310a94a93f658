// PlaceIndex: which jobs a worker has a place in, without a look at all members of all jobs.
//
// It follows the jobs it is asked about: whoever may change a job's lists of members says so with Touch, before the
// change, and Settle when no more change comes. In between every question looks at the touched jobs again. A job's
// lists never change in place (SharedList), so that one which has the lists of before costs nothing.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/store/records.h"
#include "server/store/shared_list.h"

namespace shardmesh {

struct Job;
struct NextMesh;

// Where an incarnation of a worker stands in a job.
struct Place {
  enum Kind { kMember, kOther, kNext, kDeparting };  // in the record's members and others; in those of Job::next
  const Job* job = nullptr;
  Kind kind = kMember;
  int32_t index = 0;  // in that list: of members and next ones their rank
  int64_t incarnation = 0;
};

// What all members of a job are told, made once.
struct Told {
  SharedList<WorkerIdentity> peers;  // by rank
  SharedList<int32_t> was;           // by rank, while it re-forms: MemberRecord::was; else empty
};

class PlaceIndex {
 public:
  using Jobs = std::map<std::string, Job>;

  void Touch(const std::string& job) { touched_.insert(job); }
  void Settle(const Jobs& jobs);

  // Of all incarnations of that name, by the job's name and kind. Good until the next call.
  const std::vector<Place>& Of(const Jobs& jobs, const std::string& worker);
  // REQUIRES: `job` is one of `jobs`. Good until the next call.
  const Told& ToldOf(const Jobs& jobs, const Job& job);

 private:
  // A job as it is in the index.
  struct Entry {
    const Job* job = nullptr;
    SharedList<MemberRecord> members, others;
    std::shared_ptr<const NextMesh> next;
    Told told;
  };
  void LookAgain(const Jobs& jobs);
  void Add(const std::string& name, const Job& job);
  void Remove(Entry& entry);
  void Put(const Place& place, const std::string& worker);
  void RemovePlaces(const Job* job, const std::string& worker);

  std::set<std::string> touched_;
  absl::flat_hash_map<std::string, Entry> entries_;
  absl::flat_hash_map<std::string, std::vector<Place>> places_;  // by worker
};

}  // namespace shardmesh
