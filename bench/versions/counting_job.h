// CountingJob: a job of one tensor whose elements all equal the committed step, so that whoever reads a version sees
// that it is whole; for bench/versions. For one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"

namespace shardmesh::bench {

class CountingJob {
 public:
  // On one worker, of `mebibytes` of fp32 weights, with room for `publications` versions. Errors of the client.
  static absl::StatusOr<std::unique_ptr<CountingJob>> Start(Client client, int64_t mebibytes, int publications);
  ~CountingJob();  // deletes it

  static constexpr char kName[] = "counting";

  int64_t step() const { return session_->committed_step().value(); }
  int64_t version_bytes() const;
  // Commits the next step; its seconds.
  absl::StatusOr<double> Step();
  // What the kernel holds of the publications, in bytes.
  absl::StatusOr<int64_t> ResidentPublications();

 private:
  explicit CountingJob(Client client) : client_(std::move(client)) {}

  Client client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
};

// Internal: an element of the version is not its step.
absl::Status CheckWhole(const ConstTensorView& view, shardmesh::Step step);

}  // namespace shardmesh::bench
