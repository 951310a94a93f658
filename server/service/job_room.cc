#include "server/service/job_room.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "proto/convert.h"
#include "rpc/calls/fair_share.h"

namespace shardmesh {

int64_t JobRoom::BytesOf(const JobDefinition& definition) {
  return static_cast<int64_t>(ToProto(definition.spec()).ByteSizeLong());
}

void JobRoom::Learn(const std::vector<JobView>& jobs) {
  std::map<std::string, Taken> there;
  for (const JobView& job : jobs) {
    const std::string& name = job.definition->spec().name;
    const auto known = taken_.find(name);
    if (known != taken_.end() && known->second.uid == job.uid) {
      there.emplace(name, std::move(known->second));
    } else {
      there.emplace(name, Taken{job.uid, "", BytesOf(*job.definition)});
    }
  }
  taken_ = std::move(there);
}

absl::Status JobRoom::Check(const std::string& caller, const std::string& name, int64_t bytes) const {
  Share jobs, spec_bytes;
  jobs.room = max_jobs_;
  spec_bytes.room = max_spec_bytes_;
  bool replaces = false;
  for (const auto& [there, taken] : taken_) {
    if (there == name) {
      replaces = true;
      continue;
    }
    const bool own = taken.caller == caller;
    jobs.used += 1;
    jobs.own += own;
    spec_bytes.used += taken.bytes;
    spec_bytes.own += own ? taken.bytes : 0;
  }
  if (bytes > max_spec_bytes_ - spec_bytes.used) {
    return absl::ResourceExhaustedError(absl::StrCat("job ", name, " has a specification of ", bytes,
                                                     " bytes, and those "
                                                     "of the other jobs have ",
                                                     spec_bytes.used, " of at most ", max_spec_bytes_,
                                                     "; delete jobs first"));
  }
  constexpr char kRemedy[] = "delete some of its jobs first";
  if (!replaces) RETURN_IF_ERROR(CheckShare(caller, jobs, "jobs", kRemedy));
  return CheckShare(caller, spec_bytes, "bytes of specifications", kRemedy);
}

void JobRoom::Take(const std::string& caller, const std::string& name, int64_t uid, int64_t bytes) {
  taken_[name] = {uid, caller, bytes};
}

}  // namespace shardmesh
