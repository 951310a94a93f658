// What `shardctl top` shows of a job, computed from what its workers answered.
//
// Times inside of traces are of the clock of the worker's host. They are compared with times of the same host alone,
// and of the same epoch: those of an epoch that has ended, or of another host, may be anything. A step counts as
// committed when the first worker (by rank) of a host that answered has seen its commit: when the wait behind the
// step's last command (step; gather, where weights are gathered in codes) ended. Traces hold the newest spans only:
// whatever is computed from them is about the steps that they still hold. Pure functions and plain values: thread-safe.
// Nothing that a peer sends makes them fail; what it does not say, or what makes no sense, is unset.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/shardmesh/v1/job.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {

// What one worker answered about one job: asked for its status first and for its trace then, so that the trace has
// every step that the status calls committed.
struct WorkerAnswer {
  v1::Member member;
  absl::StatusOr<v1::GetStatusReply> status;
  absl::StatusOr<v1::GetTraceReply> trace;
  int64_t answered_nanos = 0;  // when the status came, by the monotonic clock of whoever asked
};

struct JobAnswers {
  v1::JobDescription job;  // spec.parameters are not needed
  std::vector<WorkerAnswer> workers;
};

struct WorkerView {
  std::string name, device;
  std::string transport;  // of the first worker of each of several hosts: as GetStatusReply.Job.transport
  int32_t rank = 0;
  int64_t pid = 0;
  bool answered = false;         // the status
  std::optional<int64_t> epoch;  // unset: no answer, or it does not hold the job
  std::string error;             // of the job on this worker, or why there is no answer; empty: all is well
  // Of the time from the first to the last span of its trace, 0 to 1. Busy: in commands of steps (step, norm, quantize,
  // reduce_bucket, gather_bucket, merge); waiting: behind them, for the other workers.
  std::optional<double> busy, waiting;
  // Incarnations that went on with the job where the one before was killed; unset as epoch.
  std::optional<int64_t> restarts;
  std::optional<double> last_pause;  // seconds that the newest of them took; unset also: there was none, or not known
};

// One slot, which is one trainer, or one of several of the same trainer.
struct SlotView {
  int slot = 0;
  int64_t last_step = -1;  // the newest that it declared complete, as a trace has it; -1: none
  // Median, over steps, of the part of a step's period between its declaration and the commit, 0 to 1.
  std::optional<double> idle;
  // While a step waits for slots (nothing was committed since the refresh before, or there is no step to judge by): it
  // is one of those that have not declared. Else: it was the last to declare, most often.
  bool waited_for = false;
};

// A trainer of a job whose slots are pulled.
struct TrainerView {
  int seat = 0;
  int64_t pid = 0;
  int64_t slots_finished = 0;  // by whoever had the seat
  double idle_seconds = 0;     // that it waited for slots and commits, in all
  std::optional<double> idle;  // the part of the time since the view before, 0 to 1
};

struct JobView {
  std::string name;
  std::string state;  // of the job, as JobStateName
  std::string note;   // why it failed, or what it waits for
  int64_t epoch = 0;  // the newest that anybody told of
  int64_t committed_step = -1;
  int64_t answered_nanos = 0;              // when the worker answered that told the committed step; 0: no worker did
  std::optional<double> steps_per_second;  // since the view before, in the same epoch
  // Seconds, by the first worker that answered. A period goes from the commit of a step to that of the next one.
  std::optional<double> median_period, longest_period;
  // The longest time between two commits in which that worker had no command, and the step of the command that ended
  // it.
  std::optional<double> longest_pause;
  int64_t pause_before_step = -1;
  int64_t periods = 0;  // of how many steps these are
  std::vector<WorkerView> workers;
  std::vector<SlotView> slots;  // every slot of the job; none where they are pulled:
  std::vector<TrainerView> trainers;
};

// `before`: the view of this job at the refresh before; null: there is none.
JobView ViewOf(const JobAnswers& answers, const JobView* before);

}  // namespace shardmesh
