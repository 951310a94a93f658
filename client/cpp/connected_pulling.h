// ConnectedPulling: the channel of a trainer that pulls slots through gRPC, from anywhere. It has a seat at one worker
// (Shard.Seat) for as long as its connection lives; gradients and weights are this process's own memory. A slot that is
// finished is pushed first; a slot that is taken comes with the weights of its step, which are pulled once a step.
//
// If the connection breaks the workers give the slot to others, and the next call takes a new seat.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "client/cpp/client.h"
#include "client/cpp/pulling_channel.h"
#include "client/cpp/transport/seat_transport.h"
#include "core/base/sync.h"
#include "core/job/absent_weights.h"

namespace shardmesh {

class ConnectedPulling final : public PullingChannel {
 public:
  // Errors of Shard.Seat. Unimplemented: the worker is of a build in which trainers that pull slots attach.
  static absl::StatusOr<std::unique_ptr<PullingChannel>> Open(std::shared_ptr<Job> job, Rank rank);

  Step committed_step() const override { return opened_at_; }
  bool workers_look() const override { return true; }
  std::optional<int> WindowHere(int) const override { return 0; }  // what was pushed may be written again
  absl::StatusOr<Step> AwaitWeights(absl::Duration timeout) override;
  absl::StatusOr<v1::TrainerReply> Send(v1::TrainerRequest& request, absl::Time deadline, absl::Duration timeout,
                                        absl::string_view what) override;
  void Leave() override;
  // With bucket residency a bucket is pulled when it is fetched, and, while it is not dropped, with each step. A
  // trainer whose slot was taken back may get those of a later step; its result cannot count.
  absl::Status StartFetch(int) override { return absl::OkStatus(); }
  absl::Status Fetch(int bucket, bool started, absl::Duration timeout) override;
  absl::Status Drop(int bucket) override;

 private:
  ConnectedPulling(std::shared_ptr<Job> job, Rank rank) : PullingChannel(std::move(job)), rank_(rank) {}
  absl::Status TakeSeat(absl::Duration timeout);
  absl::Status TakeSeatAgain(absl::Time deadline);
  bool IsLost(const absl::Status& error) const;  // whether the seat is, after `error` of a call
  absl::StatusOr<v1::TrainerReply> SendOnce(v1::TrainerRequest& request, absl::Time deadline);
  absl::Status Push(const v1::FinishedSlot& finished, uint64_t session, absl::Time deadline);
  // The weights that a reply is about. Aborted: they cannot be had any more, since others finished the slot.
  absl::Status PullFor(const v1::SlotReply& reply, absl::Time deadline);
  absl::Status PullAny(Step at_least, absl::Time deadline);
  absl::Status Pull(int slot, Step expected, absl::Time deadline);
  absl::Status PullBuckets(int slot, Step expected, absl::Time deadline);
  absl::Status PullUntil(const std::function<bool()>& done, Step expected, absl::Time deadline);

  const Rank rank_;
  Step opened_at_{-1};
  Step weights_of_{-1};                  // -1: of none, or of several
  std::set<int> used_;                   // buckets that are fetched
  std::optional<AbsentWeights> absent_;  // none: weights are always there, or guarded where they are not
  mutable Mutex mu_;                     // held to replace seat_, by the session's thread, and to leave
  std::shared_ptr<SeatTransport> seat_ ABSL_GUARDED_BY(mu_);
  bool left_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace shardmesh
