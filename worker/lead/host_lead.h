// HostLead: the first rank of each host, of a job on several hosts: a thread that agrees with the leads of the other
// hosts on every command, moves what one host's memory lacks, and lets all hosts commit. Members of a host see only
// their control block: what they do is the same as on one host.
//
// Leads meet in rounds: an all-gather of HostWords. A lead enters a round as soon as its part is done or it has news,
// and after 100 ms to say that it is not: so a lead that does not come within `round_timeout` is stopped or gone, and
// named. All leads compute the same next part from the same words, so nobody decides for others.
//
//   collect   until the facts that follow from all words lead to a command (worker/step/decide.h): every slot is
//             declared, with every gradient shard on some host; or there are initial weights, a bucket to sum, a digest
//             to take, ...; gradient shards of slots that are complete begin to go to the hosts that have the shard
//   prepare   gradient shards of the others begin to go (host_transfers.h), bucket by bucket; each host sets a
//             publication buffer apart
//   run       DECISION: every lead writes the same command on its control block and its members execute it, each bucket
//             as soon as its gradient shards have come; new weights go to the hosts without the shard, each bucket as
//             soon as this host's members are done with it (sums of squares and maxima: when they are done with all)
//   commit    when all hosts have said that their part is done: every lead commits on its control block
//
// With bucket residency each host's window holds what its own trainers use. A bucket that another host holds, and this
// one does not, is written here all the same while a command is executed, so that it can be sent from here (it is
// lent), and its pages are given back behind the command; a version that is published goes through the publications
// instead.
//
// Gradient shards and weights go over groups of their own, beside the rounds: while bucket b is stepped, the gradient
// shards of those behind it and the weights of those before it cross. What crosses before the last slot is complete
// goes a bucket at a time, by the words of a round in which no lead has bulk bytes under way.
//
// Between the last round and the commit nothing can fail but a process: a host that dies there leaves the others
// committed, and the job over.
//
// A failure on any host (the abort word of its control block) is in its next words, and so on every page. One thread of
// its own; the public functions are for any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "worker/control/trace.h"
#include "worker/lead/host_seats.h"
#include "worker/lead/host_transfers.h"
#include "worker/lead/host_words.h"
#include "worker/lead/mail.h"
#include "worker/memory/host_memory.h"
#include "worker/pass/step_pass.h"
#include "worker/step/decide.h"
#include "worker/step/step_protocol.h"
#include "worker/transport/exchange_group.h"
#include "worker/transport/group_queue.h"

namespace shardmesh {

// Of the leads of a job's hosts, in their order. Errors name ranks of the job.
struct HostGroups {
  std::unique_ptr<ExchangeGroup> rounds, gradients, results;
};

struct HostLeadOptions {
  absl::Duration round_timeout = absl::Seconds(3);  // for another lead to come to a round: the heartbeat time-out
  absl::Duration step_timeout = absl::Seconds(60);  // for members to execute a command
  Mail* mail = nullptr;
  // Called from the lead's thread after each commit and an abort. May be empty.
  std::function<void()> progress;
  // EngineOptions::spin: of waits for the notifier. Waits for other hosts sleep.
  absl::Duration spin;
};

class HostLead {
 public:
  // Borrowed arguments, and what the options name, outlive the object. `pass`: of this host's first rank, which gives
  // pages of buckets back.
  HostLead(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job, const Plan& plan,
           HostGroups groups, HostLeadOptions options, Trace* trace = nullptr);
  // Leaves the groups: other hosts see it, and their job fails unless it is over.
  ~HostLead();
  HostLead(const HostLead&) = delete;
  HostLead& operator=(const HostLead&) = delete;

  // Bytes that came to this host so far: of gradients and of weights. Thread-safe.
  int64_t gradient_bytes_in() const { return gradient_bytes_in_.load(std::memory_order_relaxed); }
  int64_t weight_bytes_in() const { return weight_bytes_in_.load(std::memory_order_relaxed); }

 private:
  enum class Phase { kCollect, kPrepare, kRun };

  void Loop();
  void EndGroups();
  // One round: this host's words out, all hosts' in. False: the job is aborted, or the round failed and aborts it.
  bool Round();
  absl::Status GatherWords();
  absl::Status GatherBuckets(const std::vector<HostBucket>& mine);
  bool Met(const absl::Status& status);
  void ForgetBuckets(int slot);
  // Aborts the job where a host said what cannot be.
  bool CheckEach(absl::Status (*check)(const HostWords&, const JobSpec&, const Plan&));
  bool Refuse(int host, const absl::Status& status);
  // What another host's slots said first of learning rates and loss scale counts here, too.
  void TakeSettings();
  // True: the job was aborted somewhere, and is so here.
  bool TakeAbort();
  void Fail(const absl::Status& status);

  void AfterRound();
  void Collect();
  void Prepare();
  void EndPrepare();
  void Run();
  // While members execute: sees that they are done, or late.
  void LookAtMembers();
  void Commit();
  // With bucket residency: who gets the buckets that the command writes, and which of them this host lends.
  void LendBuckets();
  void ReturnLent();
  void GaveBack(const absl::Status& status);
  bool IsHere(HostSet hosts) const { return (hosts >> protocol_.local().host & 1) != 0; }

  // A group for bulk bytes, and the one gradient shard of work that it has, for a thread of its own.
  struct Lane {
    explicit Lane(std::unique_ptr<ExchangeGroup> group) : queue(std::move(group)) {}
    bool moving = false;
    GroupCall moved;
    GroupQueue queue;
  };
  void Submit(Lane& lane, std::function<absl::Status(ExchangeGroup&)> work);
  // Whether it has no work any more. A failure aborts the job.
  bool IsIdle(Lane& lane);
  // A bucket's gradient shards of slots that need not wait for others, if none are under way: little enough that the
  // rest need not wait long.
  void MoveEarly();
  // On the lanes' threads. Gradient shards by the words of all hosts, of each slot from the bucket on that `begin`
  // says: all, or just that one. Of the command that is executed.
  absl::Status MoveOneBucket(ExchangeGroup& group, const std::vector<HostWords>& words,
                             const std::vector<int>& buckets);
  absl::Status MovePieces(ExchangeGroup& group, const std::vector<HostWords>& words, const std::vector<int>& begin);
  absl::Status MoveWindows(ExchangeGroup& group, const std::vector<SeatWindow>& windows);
  absl::Status MoveResults(ExchangeGroup& group);
  absl::Status MoveWeights(ExchangeGroup& group, const Command& command, uint64_t seq);
  absl::Status MoveBucketWeights(ExchangeGroup& group, const Command& command, uint64_t seq, int bucket);
  absl::Status Exchange(ExchangeGroup& group, absl::Span<const PeerTransfer> transfers, std::atomic<int64_t>& in);
  absl::Status AwaitMembers(uint64_t seq, int buckets);
  bool PartDone();

  // How long to wait for news before the next round.
  absl::Duration NextWait();

  ControlBlock& control() { return *protocol_.control(); }

  std::atomic<int64_t> gradient_bytes_in_{0}, weight_bytes_in_{0};
  StepProtocol& protocol_;
  HostMemory& memory_;
  StepPass& pass_;
  const JobSpec& job_;
  const Plan& plan_;
  const HostLeadOptions options_;
  Trace* const trace_;
  HostTransfers pieces_of_, results_of_;  // each of one lane's thread
  const std::unique_ptr<ExchangeGroup> rounds_;
  std::vector<HostWords> words_, before_;  // by host, of this round and the last
  std::vector<char> said_, said_before_;   // the same as bytes, without the buckets
  std::vector<HostBucket> said_buckets_;
  std::vector<const HostWords*> views_, before_views_;
  std::vector<int> moved_;  // by slot: of so many first buckets the open step's gradient shards go or went

  Phase phase_ = Phase::kCollect;
  uint64_t part_ = 0;  // the one that is under way
  bool executing_ = false;
  int64_t run_since_ = 0;  // MonotonicNanos
  Facts facts_;      // that led to the command
  Command command_;  // that is prepared and run
  int reserved_ = -1;  // publication buffer
  int publish_ = -1;   // the same, as all hosts agreed on it
  HostSeats seats_;
  std::vector<HostSet> takers_;  // with bucket residency, by bucket: hosts whose windows get it with the command
  absl::Duration quiet_ = absl::ZeroDuration();
  std::atomic<bool> stop_{false};
  Lane gradients_, results_;  // their threads use what is above
  std::thread thread_;
};

}  // namespace shardmesh
