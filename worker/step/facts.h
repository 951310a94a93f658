// Facts: all that a decision (decide.h) reads, as a plain value: what every host has committed, and what trainers and
// members have said since. On one host they are read from its control block; on several the leads make them from what
// each has said (worker/lead/hosts/host_words.h), and get the same ones.
//
// Pure functions of the control block's words. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/control/control_block.h"
#include "worker/control/host_ranks.h"

namespace shardmesh {

// A gradient that is not finite.
struct BadGradient {
  int slot = 0, tensor = 0;
};

// What is committed: the same on every host.
struct Committed {
  uint64_t decided = 0;          // sequence number of the newest command
  Command last;                  // that command
  int64_t committed = kNoStep;   // the newest committed step
  int32_t parity = 0;            // where the shards' data lies
  int64_t norm_step = 0;         // the step whose gradients have the norm
  double norm = 0;
  int64_t digest_step = 0;       // the step of the newest digest
  int64_t restored = kNoStep;    // of a job that re-forms: the step that shards are filled with
};

struct Facts : Committed {
  // ---- How the job begins ----
  bool all_restored = false;     // with `restored`: every shard is filled
  uint64_t initial_id = 0;       // the set of initial weights that every member has its part of; 0: none
  uint64_t loaded_id = 0;        // the same of a checkpoint
  int64_t loaded_step = 0;

  // ---- The open step, committed + 1 ----
  bool slots_complete = false;   // every slot's gradients are there; what follows is said only then
  std::optional<BadGradient> bad;                  // of the first slot that has one
  int64_t tokens = 0;                              // with token weights: of all slots
  absl::InlinedVector<double, 16> learning_rates;  // by parameter group
  double loss_scale = 1;

  // ---- With bucket residency ----
  int bucket_to_sum = -1;        // the first one that every slot has declared and nobody has summed
  int bucket_to_gather = -1;     // the first one that a trainer uses and its host's window lacks

  // ---- With pulled slots ----
  int first_to_merge = 0, slots_to_merge = 0;  // a subtree to be summed; 0 slots: none
  int free_partial = -1;                       // where its sum goes
  int root = -1;                               // the sum that has all slots

  // ---- What somebody asked for ----
  bool digest_wanted = false, publish_wanted = false;  // by a ticket that has no answer; a version on demand
  uint64_t digest_ticket = 0, publish_ticket = 0;      // the newest ones of this host
};

Committed ReadCommitted(const ControlBlock& control);

// All of them, of a job on one host.
Facts ReadFacts(ControlBlock& control, const JobSpec& job, const Plan& plan, const HostRanks& ranks);

// What each of these adds to facts that have the committed part; `ranks`: whose host's control block it is.
void ReadBeginning(const ControlBlock& control, const HostRanks& ranks, Facts& facts);
void ReadTickets(const ControlBlock& control, Facts& facts);
// Of a control block that has all words of the open step's slots: of a job on one host, or one whose slots are pulled.
void ReadOpenStep(ControlBlock& control, const JobSpec& job, const Plan& plan, Facts& facts);
// With bucket residency: what trainers of this control block's host use.
void ReadBucketUses(ControlBlock& control, const Plan& plan, Facts& facts);

// Whether the newest command wrote weights that are gathered quantized, which a second command does.
bool QuantizeFollows(const Committed& committed, const Plan& plan);
// Whether the replicas of a job with check_every are to be compared before anything else.
bool CompareFollows(const Committed& committed, const JobSpec& job, const Plan& plan);
// Whether the newest command leads to another one at once: weights to quantize, replicas to compare, or the step that
// follows its norm.
bool MoreFollows(const Committed& committed, const JobSpec& job, const Plan& plan);

}  // namespace shardmesh
