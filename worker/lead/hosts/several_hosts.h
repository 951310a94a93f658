// SeveralHosts: the transport of a lead whose job has other hosts (lead_transport.h).
//
// Leads meet in rounds: an all-gather of HostWords. A lead enters a round as soon as its part is done or it has news,
// and after 100 ms to say that it is not: so a lead that does not come within `round_timeout` is stopped or gone, and
// named. A failure on any host (the abort word of its control block) is in its next words, and so on every host.
//
// Gradient shards and weights go over groups of their own, beside the rounds: while bucket b is stepped, the gradient
// shards of those behind it and the weights of those before it cross (command_data.h). With replicas all gradient shards
// of a step cross before it is decided (hosts_ending.h). New weights go to the hosts
// without the shard, each bucket as soon as this host's members are done with it; sums of squares and maxima, when they
// are done with all. What crosses before the last slot is complete goes a bucket at a time, by the words of a round in
// which no lead has bulk bytes under way.
//
// With bucket residency each host's window holds what its own trainers use. A bucket that another host holds, and this
// one does not, is written here all the same while a command is executed, so that it can be sent from here (it is
// lent), and its pages are given back behind the command; a version that is published goes through the publications
// instead.
//
// When a connection breaks, or a lead is killed whose next incarnation comes, the object is over, and says so (broken):
// the leads meet again, and each goes on with a new one (host_lead.h).
//
// For the lead's thread, but Leave, which is for any.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "worker/control/trace.h"
#include "worker/lead/hosts/host_progress.h"
#include "worker/lead/hosts/host_seats.h"
#include "worker/lead/hosts/host_transfers.h"
#include "worker/lead/hosts/host_words.h"
#include "worker/lead/lead_transport.h"
#include "worker/memory/host_memory.h"
#include "worker/pass/step_pass.h"
#include "worker/step/step_protocol.h"
#include "worker/transport/exchange_group.h"
#include "worker/transport/group_queue.h"

namespace shardmesh {

// Of the leads of a job's hosts, in their order. Errors name ranks of the job.
struct HostGroups {
  std::unique_ptr<ExchangeGroup> rounds, gradients, results;
};

// Bytes that came to a host so far. Thread-safe.
struct HostTraffic {
  std::atomic<int64_t> gradient_bytes_in{0}, weight_bytes_in{0};
};

struct SeveralHostsOptions {
  absl::Duration round_timeout = absl::Seconds(3);  // for another lead to come to a round: the heartbeat time-out
  absl::Duration step_timeout = absl::Seconds(60);  // for bytes to cross
  absl::Duration spin;                              // EngineOptions::spin, of waits for members
  bool meet_again = false;                          // whether leads that lose each other can
};

// Why a lead ends its groups when it goes to meet the others again: they do, too.
inline constexpr char kMeetsAgain[] = "the leads of the job's hosts meet again";
// Why one does that has ended the epoch (ControlBlock::ends): the others were about to.
inline constexpr char kEndsEpoch[] = "the leads of the job's hosts end the epoch";

class SeveralHosts final : public LeadTransport {
 public:
  // Borrowed arguments outlive the object. `pass`: of this host's first rank, which gives pages of buckets back.
  SeveralHosts(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job, const Plan& plan,
               HostGroups groups, SeveralHostsOptions options, HostTraffic& traffic, Trace* trace);

  // First: tells the others how far this host is, and does what another one has decided or committed that it has not.
  // Afterwards all are equally far. False: the job is over, and aborted here; or as Exchange.
  bool CatchUp();
  // Why this lead and another one do not hear each other any more, where they may meet again; OK: they do. Exchange has
  // returned false then, and the job is not aborted.
  const absl::Status& broken() const { return broken_; }
  // MonotonicNow of the newest round.
  absl::Time last_met() const { return last_met_; }

  bool alone() const override { return false; }
  bool Exchange(const LeadState& mine) override;
  bool AllDone(uint64_t part) const override;
  int CommonPublication(int mine) const override;
  void ReadFacts(Facts& facts) const override;
  void BringGradients(const Command& command) override;
  void BringEarly(uint64_t part) override;
  bool MayRunAhead(const Command& command) const override;
  void Ready(const Command& command) override;
  void BeforeIssue(const Command& command) override;
  void SendResults(const Command& command) override;
  bool HasGradients() override { return IsIdle(gradients_); }
  bool IsIdle() override;
  void BeforeCommit(const Command& command) override;
  void AfterCommit(bool more) override;
  absl::Duration PatienceToCollect() override;
  absl::Duration PatienceToRun() const override;
  void Leave(absl::string_view reason) override;

 private:
  absl::Status GatherWords();
  absl::Status GatherBuckets(const std::vector<HostBucket>& mine);
  bool Met(const absl::Status& status);
  void ForgetBuckets(int slot);
  // Aborts the job where a host said what cannot be.
  bool CheckEach(absl::Status (*check)(const HostWords&, const JobSpec&, const Plan&));
  bool Refuse(int host, const absl::Status& status);
  // What another host's slots said first of learning rates and loss scale counts here, too.
  void TakeSettings(const Command* running);
  // True: the job was aborted somewhere, and is so here.
  bool TakeAbort();
  // True: the epoch is to end, no command is open on any host, and it has ended here.
  bool TakeEnd();
  void Fail(const absl::Status& status);
  // Of a group's error: the leads meet again, or the job fails.
  void Broke(const absl::Status& status);
  bool MayMeetAgain(const absl::Status& status) const;
  // Of CatchUp: one command.
  void CommitBehind(absl::Span<const HostProgress> all);
  bool IssueBehind(const HostProgress& ahead);
  void TakeSeatsOver(absl::Span<const HostProgress> all);
  // With bucket residency: who gets the buckets that the command writes, and which of them this host lends.
  void LendBuckets(const Command& command);
  void LendToTakers(const Command& command);
  void ReturnLent();
  bool IsHere(HostSet hosts) const { return (hosts >> protocol_.local().host & 1) != 0; }

  // A group for bulk bytes, and the one work that it has, for a thread of its own.
  struct Lane {
    explicit Lane(std::unique_ptr<ExchangeGroup> group) : queue(std::move(group)) {}
    bool moving = false;
    GroupCall moved;
    GroupQueue queue;
  };
  void Submit(Lane& lane, std::function<absl::Status(ExchangeGroup&)> work);
  // Whether it has no work any more. A failure aborts the job.
  bool IsIdle(Lane& lane);
  // On the lanes' threads. Gradient shards by the words of all hosts, of each slot from the bucket on that `begin`
  // says: all, or just that one. Of the command that is executed.
  absl::Status MoveOneBucket(ExchangeGroup& group, const std::vector<HostWords>& words,
                             const std::vector<int>& buckets);
  absl::Status MoveGradients(ExchangeGroup& group, const std::vector<HostWords>& words, const std::vector<int>& begin);
  absl::Status MoveWindows(ExchangeGroup& group, const std::vector<SeatWindow>& windows);
  absl::Status MoveResults(ExchangeGroup& group);
  absl::Status MoveWeights(ExchangeGroup& group, const Command& command, uint64_t seq);
  absl::Status MoveBucketWeights(ExchangeGroup& group, const Command& command, uint64_t seq, int bucket);
  absl::Status Cross(ExchangeGroup& group, absl::Span<const PeerTransfer> transfers, std::atomic<int64_t>& in);
  absl::Status AwaitMembers(uint64_t seq, int buckets);

  ControlBlock& control() { return *protocol_.control(); }

  HostTraffic& traffic_;
  StepProtocol& protocol_;
  HostMemory& memory_;
  StepPass& pass_;
  const JobSpec& job_;
  const Plan& plan_;
  const SeveralHostsOptions options_;
  Trace* const trace_;
  HostTransfers gradients_of_, results_of_;  // each of one lane's thread
  const std::unique_ptr<ExchangeGroup> rounds_;
  std::vector<HostWords> words_, before_;  // by host, of this round and the last
  std::vector<char> said_, said_before_;   // the same as bytes, without the buckets
  std::vector<HostBucket> said_buckets_;
  std::vector<const HostWords*> views_, before_views_;
  std::vector<int> moved_;  // by slot: of so many first buckets the open step's gradient shards go or went

  HostSeats seats_;
  std::vector<HostSet> takers_;  // with bucket residency, by bucket: hosts whose windows get it with the command
  absl::Duration quiet_ = absl::ZeroDuration();
  absl::Status broken_;
  absl::Time last_met_;
  std::atomic<bool> left_{false};
  Lane gradients_, results_;  // their threads use what is above
};

}  // namespace shardmesh
