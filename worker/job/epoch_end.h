// EpochEnd: how a shard leaves an epoch that its job does not go on with at these workers: the job re-forms, or only
// its versions stay. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/sync.h"
#include "worker/lead/engine.h"
#include "worker/lead/hosts/hosts_ending.h"
#include "worker/pass/step_pass.h"
#include "worker/step/job_ending.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// With whom a member ends an epoch.
struct EpochMembers {
  std::vector<Rank> givers;  // of that epoch: those whose shards the next one takes
  AskHost ask;               // of a job on several hosts
  bool lost = false;         // one of that epoch is not there any more
};

class EpochEnd {
 public:
  // Borrowed arguments outlive the object.
  EpochEnd(StepProtocol& protocol, StepPass& pass, Engine& engine, Rank rank)
      : protocol_(protocol), pass_(pass), engine_(engine), rank_(rank) {}

  // The job goes on at a later epoch with what the givers have of this one: ends this epoch with them, waits until all
  // have, and brings the shard to the step that all agree on. On several hosts the leads of a healthy job end it first,
  // between two commands. `aborted` is called when the job is aborted here; it ends the lead of the host, if
  // that is here. Again: at once. From any thread.
  //   Cancelled, DeadlineExceeded: as AwaitEnding. DataLoss: the shard is damaged. Errors of EndTogether.
  absl::Status Run(const EpochMembers& members, const std::atomic<bool>& cancelled, absl::Duration timeout,
                   const std::function<void()>& aborted);
  // How it ended, once Run is through: from then on the shard does not change.
  std::optional<Ending> ending() const;
  // Of a job on several hosts: what the members of another host ask (ProgressOfStopped).
  absl::StatusOr<std::string> progress() const { return ProgressOfStopped(protocol_); }
  // Stops the engine. If Run is under way, waits for its end first. From any thread.
  void StopEngine();

 private:
  void AwaitQuiet(const std::atomic<bool>& cancelled, absl::Duration timeout) const;
  // How it ended; unset: nothing of this host is taken, so it does not matter.
  absl::StatusOr<std::optional<Ending>> Agree(const EpochMembers& members, const std::function<bool()>& cancelled,
                                              absl::Duration timeout) const;
  StepProtocol& protocol_;
  StepPass& pass_;
  Engine& engine_;
  const Rank rank_;
  mutable Mutex mu_;
  std::optional<Ending> ending_ ABSL_GUARDED_BY(mu_);
  Mutex running_mu_;  // held in Run, before mu_
};

}  // namespace shardmesh
