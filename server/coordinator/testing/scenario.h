// ScenarioRunner: drives a Coordinator by text commands and prints what happened. Tests only, not thread-safe.
//
//   join W [host=H] [inc=N]     leave W [inc=N]      heartbeat W [inc=N] [JOB=ready|preparing|failed|other_plan]
//   [step=N] create JOB ranks=N [slots=N]    delete JOB    describe JOB    resolve JOB NAME... advance DURATION the
//   clock goes on, with a tick every 500 ms pause DURATION              the clock goes on without ticks, then there is
//   one: the coordinator was held up restart                     a new coordinator on the same store
// A report has the epoch and rank that the worker was told last. Plan hashes print as HASH.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {

class ScenarioRunner {
 public:
  ScenarioRunner();
  // The printed outcome of one command, every line ended.
  std::string Run(const std::string& command);

 private:
  using Options = std::map<std::string, std::string>;
  std::string Execute(const std::string& verb, const std::vector<std::string>& words, const Options& options);
  std::string Heartbeat(const std::string& worker, const Options& options);
  std::string Describe(const std::string& job);
  void Restart();

  absl::Time now_ = absl::UnixEpoch();
  std::unique_ptr<Store> store_;  // kept across restarts
  std::unique_ptr<Coordinator> coordinator_;
  std::map<std::string, std::vector<Assignment>> told_;  // by worker: the last answer to its heartbeat
};

}  // namespace shardmesh
