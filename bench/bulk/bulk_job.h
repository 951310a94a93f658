// The job of bench/bulk behind a real coordinator and a real worker process: one rank, one slot, fp32 weights and
// gradients. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/harness/service.h"
#include "client/cpp/session.h"

namespace shardmesh::bench {

class BulkJob {
 public:
  // Starts both processes on `server_core`, the worker listening on `worker_listen`, and gives a job of `num_bytes` of
  // weights its initial weights. `folder` is for their files. Errors of the client.
  static absl::StatusOr<std::unique_ptr<BulkJob>> Start(const std::string& folder, const std::string& worker_listen,
                                                        int64_t num_bytes, int server_core);

  // Makes one step and compares, bit for bit: the pulled initial weights, the pulled weights after a pushed gradient
  // and a step (with a step computed here), the attached window. Internal: something differs.
  absl::Status Verify();

  // Pulls the newest version into destination(). Seconds.
  absl::StatusOr<double> Pull();
  // Pushes the gradient for the next step. Seconds. REQUIRES: StepOnce() between two pushes; a repetition would be
  // dropped.
  absl::StatusOr<double> Push();
  absl::Status StepOnce();
  // The worker's processor time so far.
  double WorkerSeconds() const { return service_->WorkerSeconds(); }

  // Attaches to the slot; ended by Detach. While it lasts, nobody else may push to the slot.
  absl::Status Attach();
  void Detach() { session_.reset(); }
  // REQUIRES: attached. All weights, in place.
  const char* window() const { return window_; }

  std::vector<char>& destination() { return destination_; }
  int64_t num_bytes() const { return static_cast<int64_t>(destination_.size()); }

 private:
  BulkJob() = default;
  absl::Status CreateJob(int64_t num_bytes);
  std::vector<float> ExpectedAfterOneStep() const;

  std::unique_ptr<Service> service_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  const char* window_ = nullptr;
  std::vector<float> initial_, gradient_;  // in the order of the plan
  std::vector<char> destination_;
  int64_t next_step_ = 1;
};

}  // namespace shardmesh::bench
