// A job goes on at a later epoch on another mesh, since it lost a member or was told to: shards come from what its
// members held before, stored bytes as they are (reshard.h), from each other where need be (Shard.Transfer), and from
// members of before that are none now.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/job/job_shard.h"
#include "worker/move/peer_copies.h"
#include "worker/move/reshard.h"

namespace shardmesh {

// The same job on another mesh. Errors as JobSpec::Validate().
absl::StatusOr<Plan> PlanOn(JobSpec spec, const std::string& mesh);

// Who held what, as an assignment says it.
class OriginHolders {
 public:
  // The member of now, or departing, that was this rank; null: none.
  static const v1::Peer* Find(const v1::Assignment& assignment, int was);

  explicit OriginHolders(const v1::Origin& from) : was_(from.was().begin(), from.was().end()) {
    for (const v1::Peer& departing : from.departing()) departing_.push_back(departing.rank());
  }
  Holders holders() const { return {was_, departing_}; }

 private:
  std::vector<int32_t> was_, departing_;
};

// What a member of the next epoch lacks of its shard and this one held. For one thread.
class TransferSource {
 public:
  // Errors of Shard.Transfer.
  static absl::StatusOr<std::unique_ptr<TransferSource>> Open(std::shared_ptr<JobShard> held,
                                                              const v1::TransferRequest& request);
  // The same of what is kept (TransferRequest.kept).
  static absl::StatusOr<std::unique_ptr<TransferSource>> Open(std::shared_ptr<const PeerCopies> copies,
                                                              const v1::TransferRequest& request);

  v1::TransferHeader Begin() const;
  int64_t left() const { return left_; }  // bytes
  // The next min(left(), room) bytes.
  void Read(char* to, int64_t room);
  v1::TransferHeader End();  // REQUIRES: left() is 0

 private:
  // Bytes that somebody has of a step; kNoStep: none.
  struct Held {
    std::shared_ptr<const void> owner;
    const ShardStorage& storage;
    int parity = 0;
    int64_t step = 0;
  };
  static Held HeldBy(const std::shared_ptr<JobShard>& shard);

  TransferSource(Held held, std::optional<ShardStorage> wanted);
  static absl::StatusOr<std::unique_ptr<TransferSource>> OpenEnding(std::shared_ptr<JobShard> held);

  const Held held_;
  const std::optional<ShardStorage> wanted_;  // without memory; unset: nothing
  v1::TransferHeader ending_;                 // what is told of that
  std::vector<ReshardPiece> pieces_;
  ReshardBytes bytes_;
  int64_t left_ = 0;
};

// What is told of a transfer to whoever asked for it: its header, and then its bytes.
struct TransferSink {
  std::function<absl::Status(const v1::TransferHeader&)> begin;
  std::function<absl::Status(absl::string_view)> data;
};
// Asks another worker (Shard.Transfer); returns the last header. DataLoss: fewer or more bytes than were announced.
using FetchCall = std::function<absl::StatusOr<v1::TransferHeader>(
    const v1::Peer& from, const v1::TransferRequest& request, const TransferSink& sink, absl::Duration timeout)>;

// How an epoch ended, as a member tells it that was in it.
struct EndingCall {
  const v1::Assignment& assignment;
  const FetchCall& transfer;  // null: none is possible
  const std::atomic<bool>& cancelled;
  absl::Duration timeout;
};
// How far the host of that peer is whose members have stopped (worker/lead/hosts/hosts_ending.h); waits for it.
//   Cancelled. Unavailable: the peer is not reached, or its host's members did not stop in time.
absl::StatusOr<std::string> AskProgress(const EndingCall& call, const v1::Peer& peer);
// The step and outcomes that the next epoch has of it; waits until the hosts have agreed. Errors as AskProgress.
//   DataLoss: these are not the bytes of outcomes.
absl::StatusOr<Bequest> AskBequest(const EndingCall& call, const v1::Peer& peer);

// How long bytes may be on the way, at least: a slow network's time.
absl::Duration TransferTime(int64_t bytes);

// Asks `peer` once for `pieces` of that step, into a storage whose data lies at parity 0; returns their digest.
// Errors of `transfer`. FailedPrecondition: it has another step. DataLoss: bytes changed on the way.
absl::StatusOr<uint64_t> FetchPieces(const FetchCall& transfer, const v1::Peer& peer,
                                     const v1::TransferRequest& request, const ShardStorage& storage, int64_t step,
                                     absl::Span<const ReshardPiece> pieces, const std::atomic<bool>& cancelled);

struct Restoration {
  const v1::Assignment& assignment;
  std::shared_ptr<JobShard> held;  // what this member had at assignment.from; null: nothing
  FetchCall transfer;              // null: none is possible
  const std::atomic<bool>& cancelled;
  absl::Duration timeout;
};

// Waits for the step that the lead says (BeginRestored), fills a shard of the new epoch with weights and states of that
// step, and tells so. No effect where that is none. REQUIRES: nobody steps it yet.
//   Cancelled. Unavailable: a member that gives some of it is not reached: the job is aborted for that one's loss.
//   FailedPrecondition: it is at another step, or nobody holds a shard. DataLoss: bytes changed on the way.
absl::Status RestoreShard(const Restoration& restoration, JobShard& shard);

}  // namespace shardmesh
