// A schedule of checkpoints: saves a job whenever its committed step passed the next multiple of a number, until it is
// told to stop. It waits for a coordinator or a worker that comes back, and follows a job that goes on at a later epoch
// (Client::Reopen). One save at a time. For one thread; it blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/checkpoint/checkpoint.h"

namespace shardmesh {

struct ScheduledSave {
  SavedCheckpoint saved;
  std::vector<int64_t> removed;  // steps of older ones
};

// What a schedule asks of a job; tests have one of their own.
class ScheduledJob {
 public:
  virtual ~ScheduledJob() = default;
  // The newest committed step, -1 before the first weights. Unavailable: not now, it may come back; says what is
  // missing. Any other error: it does not.
  virtual absl::StatusOr<int64_t> Look() = 0;
  // Errors of SaveCheckpoint.
  virtual absl::StatusOr<ScheduledSave> Save() = 0;
  // Whether to stop; after so long, or as soon as somebody wants it.
  virtual bool Stops(absl::Duration after) = 0;
};

struct ScheduleOptions {
  int64_t every = 1;                                  // steps
  int64_t count = 0;                                  // checkpoints, after which it ends; 0: none
  absl::Duration interval = absl::Milliseconds(200);  // from one look to the next
  std::function<void(const ScheduledSave&)> saved;    // may be empty
  // A look or a save that failed and is tried again, once for each reason. May be empty.
  std::function<void(const absl::Status&)> troubled;
};

// OK: told to stop, or `count` are saved. NotFound: the job is gone. FailedPrecondition: it failed; or errors of
// SaveCheckpoint that waiting does not mend: a full disk, replicas that differ. InvalidArgument: every is below 1.
absl::Status RunSchedule(ScheduledJob& job, const ScheduleOptions& options);

struct SaveScheduleOptions {
  std::string root;
  KeepRule keep;     // after each; last 0: all stay
  SaveOptions save;  // of each
  ScheduleOptions schedule;
  std::function<bool(absl::Duration)> stops;  // as ScheduledJob::Stops
};
// The same of a job that was opened for training.
absl::Status SaveOnSchedule(Client& client, std::shared_ptr<Job> job, const SaveScheduleOptions& options);

}  // namespace shardmesh
