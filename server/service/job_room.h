// JobRoom: what callers take of a coordinator's room for jobs: how many there are, and the bytes of their
// specifications. Callers are known since the process started; jobs of before count as nobody's.
//
// Not thread-safe: the service calls it under its lock, with the jobs that there are at the time.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {

class JobRoom {
 public:
  JobRoom(int max_jobs, int64_t max_spec_bytes) : max_jobs_(max_jobs), max_spec_bytes_(max_spec_bytes) {}

  // Of the specification, as it travels.
  static int64_t BytesOf(const JobDefinition& definition);

  // Learns which jobs there are, all of them: of others it forgets what they took. Before Check.
  void Learn(const std::vector<JobView>& jobs);
  // OK: `caller` (CallerKey of rpc/calls/caller_share.h; empty: not capped) may make a job of that name, new or in
  // place of one that is there. ResourceExhausted: all specifications would have more than max_spec_bytes, or the
  // caller has its share of the jobs or the bytes (rpc/calls/fair_share.h). How many jobs there may be in all the
  // coordinator says.
  absl::Status Check(const std::string& caller, const std::string& name, int64_t bytes) const;
  // The caller has made it.
  void Take(const std::string& caller, const std::string& name, int64_t uid, int64_t bytes);

 private:
  struct Taken {
    int64_t uid = 0;
    std::string caller;  // empty: nobody who is counted
    int64_t bytes = 0;
  };

  const int max_jobs_;
  const int64_t max_spec_bytes_;
  std::map<std::string, Taken> taken_;  // by name
};

}  // namespace shardmesh
