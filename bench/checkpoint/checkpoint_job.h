// CheckpointJob: a job of a service that is saved, loaded and trained for bench/checkpoint. For one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bench/harness/model_shapes.h"
#include "bench/harness/service.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/session.h"

namespace shardmesh::bench {

class CheckpointJob {
 public:
  // On "fsdp=WORKERS", fp32 weights, a slot for each worker; it has done two steps. Errors of the client.
  static absl::StatusOr<std::unique_ptr<CheckpointJob>> Start(Service& service, const ModelShapes& model,
                                                              StateFormat states, int workers);

  int64_t step() const { return session_->committed_step().value(); }
  // Of the last save.
  const SavedCheckpoint& saved() const { return saved_; }

  // Seconds of a save into root/. Internal: its digest is not the job's.
  absl::StatusOr<double> Save(const std::string& root);

  struct LoadTimes {
    double load = 0;   // into a job that is there, without weights
    double whole = 0;  // and to make that job before
  };
  // The last save on "fsdp=WORKERS", in a job that is deleted again. Internal: it has another digest.
  absl::StatusOr<LoadTimes> Load(int workers);

  struct Iterations {
    double with = 0, without = 0;  // medians of the seconds of an iteration, while a checkpoint is saved and not
    double longest = 0;            // with
  };
  // An iteration: computing for so long, which is sleeping here, and a step. `count` of them before and after those
  // that take place during a save.
  absl::StatusOr<Iterations> Iterate(const std::string& root, int count, absl::Duration computing);

  // Ends the session, and deletes the job.
  absl::Status Delete();

 private:
  explicit CheckpointJob(Service& service) : service_(service) {}
  absl::StatusOr<double> Iteration(absl::Duration computing);

  Service& service_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  SavedCheckpoint saved_;
};

}  // namespace shardmesh::bench
