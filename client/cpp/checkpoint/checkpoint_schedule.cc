#include "client/cpp/checkpoint/checkpoint_schedule.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

bool MayMend(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsDeadlineExceeded(status);
}

class Schedule {
 public:
  Schedule(ScheduledJob& job, const ScheduleOptions& options) : job_(job), options_(options) {}

  absl::Status Run() {
    int64_t saves = 0;
    do {
      const absl::StatusOr<int64_t> step = job_.Look();
      if (!step.ok()) {
        RETURN_IF_ERROR(Told(step.status()));
        continue;
      }
      if (next_ < 0 || *step < seen_) next_ = After(*step);  // at first, and of a job that began again
      seen_ = *step;
      if (*step < next_) continue;
      const absl::StatusOr<ScheduledSave> save = job_.Save();
      if (absl::IsAlreadyExists(save.status())) {  // of another run, whose checkpoint stays
        if (options_.troubled) options_.troubled(save.status());
        next_ = After(*step);
        continue;
      }
      if (!save.ok()) {
        RETURN_IF_ERROR(Told(save.status()));
        continue;
      }
      trouble_ = absl::OkStatus();
      next_ = After(save->saved.step);
      if (save->saved.already_there) continue;  // by somebody else
      if (options_.saved) options_.saved(*save);
      if (++saves == options_.count) return absl::OkStatus();
    } while (!job_.Stops(options_.interval));
    return absl::OkStatus();
  }

 private:
  // The first multiple above `step`.
  int64_t After(int64_t step) const { return step < 0 ? 0 : (step / options_.every + 1) * options_.every; }

  // OK: it may mend.
  absl::Status Told(const absl::Status& status) {
    if (!MayMend(status)) return status;
    if (options_.troubled && status != trouble_) options_.troubled(status);
    trouble_ = status;
    return absl::OkStatus();
  }

  ScheduledJob& job_;
  const ScheduleOptions& options_;
  int64_t next_ = -1, seen_ = -1;
  absl::Status trouble_;
};

// A job of the service.
class ServedJob : public ScheduledJob {
 public:
  ServedJob(Client& client, std::shared_ptr<Job> job, const SaveScheduleOptions& options)
      : client_(client), job_(std::move(job)), options_(options) {}

  absl::StatusOr<int64_t> Look() override {
    v1::DescribeJobRequest request;
    request.set_job(job_->spec().name);
    ASSIGN_OR_RETURN(const v1::JobDescription job,
                     client_.coordinator().DescribeJob(request, job_->options().call_timeout));
    if (job.state() == v1::JOB_STATE_FAILED) {
      return absl::FailedPreconditionError(absl::StrCat("job ", request.job(), " failed: ", job.error()));
    }
    if (job.state() != v1::JOB_STATE_READY) {
      return absl::UnavailableError(absl::StrCat("job ", request.job(), " is not ready; it waits for ", WaitsFor(job)));
    }
    if (job.epoch() > job_->epoch().value()) {
      ASSIGN_OR_RETURN(job_, client_.Reopen(*job_));
    } else if (job.epoch() < job_->epoch().value()) {  // of another state file
      ASSIGN_OR_RETURN(job_, client_.OpenJob(request.job()));
    }
    return job.committed_step();
  }

  absl::StatusOr<ScheduledSave> Save() override {
    absl::StatusOr<SavedCheckpoint> saved = SaveCheckpoint(*job_, options_.root, options_.save);
    if (absl::IsNotFound(saved.status())) return absl::UnavailableError(saved.status().message());  // a look tells
    RETURN_IF_ERROR(saved.status());
    ScheduledSave save{*std::move(saved), {}};
    if (options_.keep.last > 0 && save.saved.recorded.ok()) {
      ASSIGN_OR_RETURN(save.removed, Prune(options_.root, options_.keep));
    }
    return save;
  }

  bool Stops(absl::Duration after) override { return options_.stops(after); }

 private:
  Client& client_;
  std::shared_ptr<Job> job_;
  const SaveScheduleOptions& options_;
};

}  // namespace

absl::Status RunSchedule(ScheduledJob& job, const ScheduleOptions& options) {
  if (options.every < 1) {
    return absl::InvalidArgumentError(absl::StrCat("every is ", options.every, "; it is at least 1 step"));
  }
  return Schedule(job, options).Run();
}

absl::Status SaveOnSchedule(Client& client, std::shared_ptr<Job> job, const SaveScheduleOptions& options) {
  ServedJob served(client, std::move(job), options);
  return RunSchedule(served, options.schedule);
}

}  // namespace shardmesh
