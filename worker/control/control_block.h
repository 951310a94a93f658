// ControlBlock: the words through which the workers of one host agree on the steps of one job. It lies in a segment
// that every worker of the job maps; nobody else does.
//
// The lead (rank 0) decides, everybody executes, the lead commits:
//
//   trainers        declare slot words for step k                                      notifier
//   lead            sees all of them, writes `command`, decided = seq                  DECISION POINT
//   (of a job that clips gradients: first a command of kNorm, which every worker answers with the sums of squares
//   behind the control block, and which changes nothing; its commit makes the norm known, and the step is decided with
//   it)
//   every worker    executes it on its shard; member.done = seq                        notifier
//   (of a job that gathers weights in codes (core/format/gather_format.h): a step, or the initial weights, is followed
//   by a command of kQuantize for the same step, by which every worker writes its codes into the window and the
//   publication, with scales from the maxima behind the control block, which the first command raised; the step is
//   committed with it)
//   (of a job with bucket residency (worker/control/residency.h) there are two more commands, for one bucket each:
//   kReduceBucket, by which every worker sums its shard's gradients when all slots have declared the bucket, and
//   kGatherBucket, by which it writes its part of a bucket that a trainer acquired into the window; the step is decided
//   when every bucket is summed)
//   (of a job whose slots are pulled (pulled_words.h) commands of kMerge come before, which sum what is finished; the
//   step is decided when one of the sums has all slots)
//   (of a job that re-forms (job_ending.h) the first command is kRestore: shards are filled with what they were at an
//   older epoch, and their weights are written as kInit writes them)
//   (of a job that publishes on demand, kPublish: every worker copies its share of the window into a publication)
//   lead            sees all done, writes committed_step and outcome, committed = seq  finished
//   everybody       answers its trainers and readers
//
// Before the decision no shard and no window byte changes; after it the command is only rolled forward, and it can be
// executed and committed again from the same words (nothing it needs lies in a process, but for initial weights). So
// the next incarnation of a worker that was killed goes on where that one was, if a node has the memory (worker/node):
// what a process holds for a while (pins, pushes, declarations) is counted by rank, for the next incarnation to take
// back. Any worker may set `abort` (once, from 0): then every wait of every worker ends and the job is failed.
//
// Of a job on several hosts every host has its own control block, in which the words of other hosts' members stay zero.
// Its lead, the first rank of the host, decides what all leads agreed on, and commits when all hosts are done
// (worker/lead/hosts/several_hosts.h).
//
// All words are lock-free atomics, zero at creation. Commands lie in two places in turn: the next one is written while
// all members are done with the newest, which stays as it was until `decided` says otherwise.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/control/pulled_words.h"
#include "worker/control/version_words.h"

namespace shardmesh {

inline constexpr int kOutcomeRing = 256;
inline constexpr int64_t kNoStep = -1;  // before the initial weights

inline constexpr double kMinLossScale = 0x1p-64, kMaxLossScale = 0x1p64;

enum class CommandKind : int32_t {
  kNone = 0,
  kInit = 1,
  kStep = 2,
  kDigest = 3,
  kNorm = 4,
  kQuantize = 5,
  kReduceBucket = 6,
  kGatherBucket = 7,
  kMerge = 8,
  kRestore = 9,
  kPublish = 10
};

// One decision: everything that executing it needs beside the slots' gradients and the shard.
struct Command {
  CommandKind kind = CommandKind::kNone;
  int32_t first = 0;  // 1: of kInit and kRestore, and kQuantize after them: frozen weights are written, too
  // Of kStep, kNorm, kQuantize, kReduceBucket, and of kRestore the one that shards have; kInit: 0; of kDigest,
  // kGatherBucket and kPublish the committed one.
  int64_t step = 0;
  float divide_scale = 1;                 // of kStep and kNorm: what sums of gradients are multiplied by
  float clip = 1;                         // of kStep: and then with this
  int32_t apply = 0;                      // of kStep: 0 = skipped, a gradient was not finite
  int32_t bucket = -1;                    // of kReduceBucket and kGatherBucket
  int32_t partial = -1;                   // with pulled slots: the sum that kMerge makes, and that a step reads
  int32_t first_slot = 0, num_slots = 0;  // of kMerge: the slots that it has
  int32_t parity = 0;                     // where the shard's data lies before it (shard_storage.h)
  int32_t publish = -1;                   // the publication buffer that gets this version, -1: none
  int32_t groups = 0;  // of kStep: where the scalars of its parameter groups lie, 0 or 1 (group_table.h)
  int64_t nonfinite = 0;  // kStep: why skipped: slot << 32 | tensor; kDigest, kPublish: the newest ticket it answers
  // Of kInit: push_id of the initial weights to place. Of kRestore: load_id of what was loaded, 0 where the shards are
  // filled by other workers.
  uint64_t initial_id = 0;
};

static_assert(sizeof(Command) == 3 * sizeof(int64_t) + 12 * sizeof(int32_t), "there is padding");

// One worker's words.
struct alignas(64) MemberWords {
  std::atomic<int64_t> alive_nanos;        // MonotonicNanos of its last sign of life; 0: it has not come yet
  std::atomic<uint64_t> done;              // seq of the last command it executed
  std::atomic<uint64_t> initial_id;        // push_id of its complete shard of initial weights
  std::atomic<int64_t> loaded_step;        // of what it loaded from a checkpoint
  std::atomic<uint64_t> loaded_id;         // load_id of that, when the job may begin with it; 0: nothing
  std::atomic<uint64_t> digest;            // of its shard, by the last kDigest
  std::atomic<int64_t> pid;                // for messages
  std::atomic<uint64_t> buckets_done;      // BucketWord of the command's seq: it is done with so many first buckets
  std::atomic<uint64_t> damage;            // Damage::Word (damage.h) of what it found first in its shard; 0: nothing
  std::atomic<uint64_t> incarnations_of;   // the open command that its next incarnations found, 0: none was open
  std::atomic<uint32_t> incarnations_in_command;  // and how many did
  std::atomic<uint32_t> retained;          // 1: a node has its memory; should it die, its next incarnation comes soon
  std::atomic<uint32_t> restarts;          // incarnations that went on where the one before was killed
  std::atomic<int64_t> pause_nanos;        // until the newest of them did; 0: not known
  std::atomic<uint32_t> stopped;           // 1: its engine ended for good, since the job goes on at a later epoch
  std::atomic<uint32_t> restored;          // 1: its shard has the weights and states of restored_step_plus_one
};

// In a slot's `holder`: the session is gone, and its slot not free yet.
inline constexpr uint64_t kLeaving = uint64_t{1} << 31;
// The session asks for it, and may not write yet: of a job on several hosts, until the leads know
// (worker/lead/hosts/host_slots.h).
inline constexpr uint64_t kAsking = uint64_t{1} << 30;
// The session and the rank it is attached to, of a holder.
constexpr uint64_t SessionOf(uint64_t holder) { return holder & (kAsking - 1); }
constexpr int AttachedTo(uint64_t holder) { return static_cast<int>(holder >> 32) - 1; }

// One slot's words.
struct alignas(64) SlotWords {
  std::atomic<int64_t> declared;    // newest step declared complete for it; 0: none
  std::atomic<double> loss_scale;   // of that step; its learning rates are in the GroupTable
  std::atomic<int64_t> tokens;      // that its gradients of that step are the sum over
  std::atomic<int64_t> nonfinite;   // NonFiniteWord of a gradient that is not finite; read with `declared`
  std::atomic<uint64_t> holder;     // writes it: 0 nobody, else (rank + 1) << 32 | session; | kLeaving or kAsking
  std::atomic<int64_t> holder_pid;  // for messages; 0: unknown
  std::atomic<uint32_t> times_left;  // sessions that held it and ended
  std::atomic<int64_t> refused;     // RefusedWord of a declaration that was taken back, until the next one; 0: none
  std::atomic<int32_t> declaring[kMaxHostRanks];  // by rank: declarations of connected trainers under way there
};

// Of a job on several hosts: what another host said of a slot in the last round (worker/lead/hosts/host_lead.h).
struct alignas(64) ElsewhereWords {
  std::atomic<int64_t> declared;  // as SlotWords
  std::atomic<uint64_t> holder;
  std::atomic<uint64_t> gradient_shards;  // of the open step: bit p: shard p's; 0 from the moment before its commit
};

struct OutcomeWords {
  std::atomic<int64_t> step;
  std::atomic<double> norm;      // of all gradients; 0: not known
  std::atomic<int64_t> skipped;  // 0: applied; else (slot << 32 | tensor) + 1
  std::atomic<int64_t> peak;     // with pulled slots: most gradients alive at a time
};

// Why a declaration was taken back that another host's came before: step << 8 | reason.
enum class Refusal : uint8_t { kNone = 0, kOtherRates = 1 };
static_assert(kMaxStep < (int64_t{1} << (63 - 8)));
constexpr int64_t RefusedWord(int64_t step, Refusal why) { return step << 8 | int64_t(why); }

// In settings_claim, in place of a slot: what another host's slots said (GroupTable::said_elsewhere, and
// elsewhere_loss_scale).
inline constexpr int kRatesElsewhere = 0xffff;
static_assert(kMaxSlots < kRatesElsewhere && kMaxStep < (int64_t{1} << (63 - 16)));

inline constexpr int kMaxCause = 512;

struct ControlBlock {
  // Words that are waited on (futex), each on a line of its own. The lead's notifier lies outside (host_memory.h).
  alignas(64) std::atomic<uint32_t> decision;  // for all: `decided` or `abort` changed
  alignas(64) std::atomic<uint32_t> finished;  // for all: `committed` or `abort` changed

  alignas(64) std::atomic<uint64_t> decided;     // seq of the newest command
  std::atomic<uint64_t> committed;               // seq of the newest command that all executed
  std::atomic<int64_t> committed_step_plus_one;  // 0: no weights yet
  std::atomic<int32_t> parity;                   // of every shard's storage, as of `committed`
  std::atomic<uint64_t> abort;                   // 0, or AbortWord
  std::atomic<int64_t> norm_step;                // whose gradients have the norm
  std::atomic<double> norm;
  std::atomic<uint64_t> gradients_here;  // of a job on several hosts: BucketWord of the step: so many have come
  Command commands[2];                   // seq at seq % 2

  alignas(64) std::atomic<uint64_t> settings_claim;  // step << 16 | slot of the first declaration of that step
  std::atomic<double> elsewhere_loss_scale;
  std::atomic<uint32_t> taking_messages;  // odd while the lead takes and declares what trainers sent (step_mail.h)
  // Sessions of this host that ended while their process lived on: it may have their slots mapped, so steps look again
  // at what they read. And whether another host has such a session: gradient shards of its slots cross to this host.
  std::atomic<uint32_t> looks_again;
  std::atomic<uint32_t> elsewhere_looks_again;
  std::atomic<uint64_t> digest_wanted;   // tickets
  std::atomic<uint64_t> digest_done;
  std::atomic<uint64_t> digest_writing;  // odd while the next three are written
  std::atomic<uint64_t> digest_value;
  std::atomic<int64_t> digest_step;
  std::atomic<uint64_t> digest_differs;  // 0, or (rank a + 1) << 32 | rank b + 1 of replicas that differ

  // Of a job that re-forms (job_ending.h). At the epoch that ends: the newest command as its members agreed on it, an
  // EndingWord; 0: they did not yet. At the next one: the step that its shards are filled with, plus 1; 0: none.
  std::atomic<uint64_t> ending;
  std::atomic<uint64_t> ended;  // of a job on several hosts: the same, as their members agreed on it (hosts_ending.h)
  std::atomic<uint32_t> ends;   // 1: the leads of several hosts are to end the epoch between two commands
  std::atomic<int64_t> restored_step_plus_one;
  std::atomic<uint64_t> restore_begun;  // 1: that word says it

  std::atomic<int64_t> publications_refused;  // versions that found every publication held
  // On demand: tickets; and of the newest one that was answered the version, -1: every publication is held.
  std::atomic<uint64_t> publish_wanted, publish_done;
  std::atomic<int64_t> publish_step;

  // Of an abort for kNotMet or kBadFacts: why, ended by a zero; written by the lead before it aborts.
  char cause[kMaxCause];

  MemberWords members[kMaxHostRanks];
  SlotWords slots[kMaxSlots];
  ElsewhereWords elsewhere[kMaxSlots];
  // [slot][shard]: newest step whose gradient shard lies there
  std::atomic<int64_t> gradient_shards[kMaxSlots][kMaxHostRanks];
  // [slot][shard]: rank + 1 of the worker that receives it; 0: nobody
  std::atomic<int32_t> pushes[kMaxSlots][kMaxHostRanks];
  // Of a job on several hosts: the host whose gradient shard the step, norm or sum of a bucket is made of that leads
  // agreed on last ([slot][shard]); and the newest step whose gradient shards all count from there, wherever else
  // gradient_shards says that they lie (worker/lead/hosts/gradient_sources.h).
  std::atomic<uint8_t> gradient_sources[kMaxSlots][kMaxHostRanks];
  std::atomic<int64_t> gradient_sources_step;
  PublicationWords publications[kMaxPublications];
  LeaseWords leases[kMaxLeases];
  ReaderWords readers[kMaxReaders];
  OutcomeWords outcomes[kOutcomeRing];  // of step s at s % kOutcomeRing
  // With pulled slots. `slots` above are then words of the trainers' seats, but for nonfinite and tokens.
  PulledWords pull;
};

// The sum of squares of each block of kBlockElements, Plan::norm_blocks() of them, behind the control block.
inline float* SquareSums(ControlBlock* control) { return reinterpret_cast<float*>(control + 1); }

// The largest magnitude under each scale of quantized weights, as bits of fp32, plan.scales().num_maxima of them,
// behind those: zero when a command that writes weights is decided, raised while it is executed.
inline std::atomic<uint32_t>* Maxima(ControlBlock* control, const Plan& plan) {
  return reinterpret_cast<std::atomic<uint32_t>*>(SquareSums(control) + plan.norm_blocks());
}

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<double>::is_always_lock_free);

// A step's gradient that is not finite, in one word that grows with the step; 0: there was none.
static_assert(kMaxParameters < (1 << 24) && kMaxStep < (int64_t{1} << (63 - 24)));
constexpr int64_t NonFiniteWord(int64_t step, int tensor) { return step << 24 | (tensor + 1); }
constexpr int64_t NonFiniteStepOf(int64_t word) { return word >> 24; }
constexpr int NonFiniteTensorOf(int64_t word) { return static_cast<int>(word & 0xffffff) - 1; }

// In place of a gradient that is not finite, of a step that was skipped since no slot had a token.
inline constexpr int64_t kNoTokens = int64_t{0xffff} << 32;

// So many buckets, the first ones, of a command or step: a word that grows with both, and begins anew after 2^44.
static_assert(kMaxParameters < (1 << 20));
constexpr uint64_t BucketWord(uint64_t of, int buckets) { return of << 20 | static_cast<uint64_t>(buckets); }
// Whether a word says as much as the other one, or more; both are of times less than 2^43 apart.
constexpr bool Reaches(uint64_t word, uint64_t other) { return static_cast<int64_t>(word - other) >= 0; }

// Why a job was aborted, in one word: who reported it, about whom, and what it saw.
enum class AbortReason : uint8_t {
  kSilent = 1,
  kGone = 2,
  kLate = 3,
  kLeft = 4,
  kInternal = 5,
  kUnreachable = 6,
  kNotMet = 7,
  kDevice = 8,
  kDamaged = 9,    // members[about].damage says where; 0: on another host
  kReformed = 11,  // it goes on at a later epoch
  kBadFacts = 12,  // its host said of the job what cannot be; `cause` says what, where it was seen
  kDiffers = 10    // the reporter's replica of the same shard has other bits
};
// `device`: of kDevice, the CUDA device of the worker that it is about.
constexpr uint64_t AbortWord(AbortReason reason, int about, int reporter, int device = 0) {
  return uint64_t{1} << 63 | uint64_t(device & 0xffff) << 40 | uint64_t(reason) << 32 | uint64_t(about & 0xffff) << 16 |
         uint64_t(reporter & 0xffff);
}
constexpr AbortReason ReasonOf(uint64_t word) { return AbortReason(word >> 32 & 0xff); }
constexpr int DeviceOf(uint64_t word) { return static_cast<int>(word >> 40 & 0xffff); }
constexpr int AboutOf(uint64_t word) { return static_cast<int>(word >> 16 & 0xffff); }
constexpr int ReporterOf(uint64_t word) { return static_cast<int>(word & 0xffff); }

}  // namespace shardmesh
