// HostTrainer: a process on one host of a fleet that trains a job with some of its slots, at whatever epoch the job is,
// and what it said of its steps. Its gradients depend on slot, step and parameter alone. For one thread.
//
// The process is the benchmark's own program, started again: its main hands what AddHostTrainingFlags read to
// TrainOnHost.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/process.h"
#include "bench/moves/host_fleet.h"

namespace shardmesh::bench {

// What such a process does. The job's parameters are layers.0, layers.1, ... with kLayerElements each. Its gradients
// are in bf16.
struct HostTraining {
  std::string job;
  std::vector<int> slots;  // empty: this process is no trainer
  int layers = 0;
  double rest_ms = 0;  // between steps
  int64_t until = 0;   // the last step, and a digest of each; 0: it trains until it is killed
  // Set by HostTrainer::Start.
  std::string coordinator = "", folder = "";
};
inline constexpr int64_t kLayerElements = int64_t{1} << 20;

// Hidden options, as HostTrainer::Start gives them. `training` outlives the parsing.
void AddHostTrainingFlags(CLI::App& app, HostTraining& training);
// What main returns.
int TrainOnHost(const HostTraining& training);

class HostTrainer {
 public:
  // It attached to the job.
  struct Opened {
    int64_t epoch = 0, committed = 0;
    int64_t back = -1;  // the step that the job went back to since this trainer attached last; -1: it did not
  };
  // A step was committed, at MonotonicSeconds() `at`.
  struct Done {
    int64_t epoch = 0, step = 0;
    double at = 0;
  };

  // `program`: of whoever calls this, for ProgramPath. Errors of Process.
  static absl::StatusOr<std::unique_ptr<HostTrainer>> Start(const HostFleet& fleet, int host,
                                                            const std::string& program, const HostTraining& training);

  // Reads on until the process has done `step`, or a later one, at an epoch after `epoch`; or has the digest of `step`.
  // Internal: it ended, and says why. DeadlineExceeded: it said nothing for a minute.
  absl::Status AwaitStep(int64_t epoch, int64_t step);
  absl::Status AwaitDigest(int64_t step);

  // All that was read so far.
  const std::vector<Opened>& opened() const { return opened_; }
  const std::vector<Done>& done() const { return done_; }
  const std::map<int64_t, uint64_t>& digests() const { return digests_; }  // by step

 private:
  HostTrainer() = default;
  absl::Status Read();

  std::unique_ptr<Process> process_;
  std::vector<Opened> opened_;
  std::vector<Done> done_;
  std::map<int64_t, uint64_t> digests_;
};

}  // namespace shardmesh::bench
