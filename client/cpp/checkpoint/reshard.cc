#include "client/cpp/checkpoint/reshard.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/next_incarnation.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr absl::Duration kLongestCall = absl::Seconds(10);

class Resharding {
 public:
  Resharding(Client& client, const std::string& name, const MeshSpec& mesh, const ReshardOptions& options)
      : client_(client), name_(name), mesh_(mesh), options_(options), deadline_(MonotonicNow() + options.timeout) {}

  absl::StatusOr<std::shared_ptr<Job>> Run() {
    RETURN_IF_ERROR(Begin());
    while (true) {
      v1::DescribeJobRequest request;
      request.set_job(name_);
      const absl::StatusOr<v1::JobDescription> job = client_.coordinator().DescribeJob(request, call_timeout());
      if (job.ok()) {
        ASSIGN_OR_RETURN(const bool there, Look(*job));
        if (there) {
          absl::StatusOr<std::shared_ptr<Job>> opened = client_.OpenJob(name_);
          if (!absl::IsUnavailable(opened.status())) return opened;
        }
      } else if (!IsAway(job.status())) {
        return job.status();
      }
      if (MonotonicNow() >= deadline_) return GiveUp(job);
      Pause(kPoll);
    }
  }

 private:
  absl::Duration call_timeout() const { return TimeOfCall(deadline_, kLongestCall); }
  // The coordinator may be away, or slow, for a while.
  static bool IsAway(const absl::Status& status) {
    return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  }

  // A job that just re-forms, and a coordinator that is away, are waited for.
  absl::Status Begin() {
    v1::ReshardJobRequest request;
    request.set_job(name_);
    *request.mutable_mesh() = ToProto(mesh_);
    while (true) {
      const absl::StatusOr<v1::JobDescription> begun = client_.coordinator().ReshardJob(request, call_timeout());
      if (begun.ok()) {
        ASSIGN_OR_RETURN(was_, MeshSpecFromProto(begun->spec().mesh()));
      }
      if (!IsAway(begun.status()) || MonotonicNow() >= deadline_) return begun.status();
      Pause(kPoll);
    }
  }

  // Whether the job is there.
  absl::StatusOr<bool> Look(const v1::JobDescription& job) {
    if (job.state() == v1::JOB_STATE_FAILED) {
      return absl::UnavailableError(absl::StrCat("job ", name_, " failed: ", job.error()));
    }
    if (job.has_resharding() && options_.progress) {
      const int all = job.resharding().workers_size() + job.resharding().leavers_size();
      options_.progress(all - job.resharding().preparing_size(), all);
    }
    if (job.state() != v1::JOB_STATE_READY || job.has_resharding()) return false;
    ASSIGN_OR_RETURN(const MeshSpec mesh, MeshSpecFromProto(job.spec().mesh()));
    if (mesh == mesh_) return true;
    if (!job.reshard_error().empty()) {
      return absl::AbortedError(absl::StrCat("job ", name_, " goes on on mesh ", mesh.ToString(),
                                             mesh == was_ ? " as it was: " : ": ", job.reshard_error()));
    }
    RETURN_IF_ERROR(Begin());  // the coordinator was restarted, and knows nothing of it
    return false;
  }

  absl::Status GiveUp(const absl::StatusOr<v1::JobDescription>& job) {
    const std::string time = absl::FormatDuration(options_.timeout);
    if (job.ok() && job->has_resharding()) {
      v1::ReshardJobRequest back;
      back.set_job(name_);
      *back.mutable_mesh() = job->spec().mesh();
      client_.coordinator().ReshardJob(back, kLongestCall).status().IgnoreError();
      return absl::DeadlineExceededError(absl::StrCat("job ", name_, " was not ready for mesh ", mesh_.ToString(),
                                                      " within ", time, "; that was called off, it goes on as it was"));
    }
    return absl::DeadlineExceededError(absl::StrCat("job ", name_, " was not on mesh ", mesh_.ToString(), " within ",
                                                    time, "; it may still come there: shardctl jobs ", name_));
  }

  Client& client_;
  const std::string name_;
  const MeshSpec mesh_;
  const ReshardOptions options_;
  const absl::Time deadline_;
  MeshSpec was_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Job>> ReshardJob(Client& client, const std::string& name, const MeshSpec& mesh,
                                                const ReshardOptions& options) {
  RETURN_IF_ERROR(mesh.Validate());
  return Resharding(client, name, mesh, options).Run();
}

}  // namespace shardmesh
