// How the members of a job on several hosts end an epoch that the job does not go on with: it re-forms without a host or
// a worker, or is brought to another mesh.
//
// On each host the members stop, and agree on the newest command of their control block (worker/step/job_ending.h). A
// host may have decided or committed one that another has not, so each then asks the others how far they are and does
// what the furthest has done. What a host says is final but for that, so all end alike. If one that was asked dies, the
// job is assigned anew, and those that are left ask each other again: whatever it had told one of them, that one tells.
//
// That a host can execute a command which it has not decided takes all of the step's gradients: a job with replicas
// brings them to every host before the decision (SeveralHosts::MayRunAhead). A job without them loses its shards with a
// host anyway, and is ended by its leads between two commands (EpochEnd).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/lead/hosts/host_progress.h"
#include "worker/step/job_ending.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// How far a host is whose members have stopped, as the bytes of its HostProgress. Waits for it; errors end the wait.
using AskHost = std::function<absl::StatusOr<std::string>(int host)>;

// What AskHost gets from this host. Unavailable: its members have not stopped yet.
absl::StatusOr<std::string> ProgressOfStopped(const StepProtocol& protocol);

// Asks `others`, brings this host's control block to where the furthest is, and says how the epoch ended, there
// (ControlBlock::ended) and to the caller. By one member of each host, behind AwaitEnding. Again: the same.
//   DataLoss, FailedPrecondition: what a host says cannot be; the message names it. Else errors of `ask`.
absl::StatusOr<Ending> EndTogether(StepProtocol& protocol, const std::vector<int>& others, const AskHost& ask);

}  // namespace shardmesh
