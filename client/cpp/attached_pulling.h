// AttachedPulling: the channel of a trainer that pulls slots on a host of the workers: windows are shared memory, and
// requests go into the seat's mailbox (attached_channel.h).
#pragma once

#include <memory>

#include "client/cpp/attached_channel.h"
#include "client/cpp/pulling_channel.h"

namespace shardmesh {

class AttachedPulling final : public PullingChannel {
 public:
  // Errors of Job::Attach.
  static absl::StatusOr<std::unique_ptr<PullingChannel>> Open(std::shared_ptr<Job> job, Rank rank);

  Step committed_step() const override { return Step(channel_->welcome().committed_step()); }
  bool workers_look() const override { return false; }
  std::optional<int> WindowHere(int named) const override;
  absl::StatusOr<Step> AwaitWeights(absl::Duration timeout) override;
  absl::StatusOr<v1::TrainerReply> Send(v1::TrainerRequest& request, absl::Time deadline, absl::Duration timeout,
                                        absl::string_view what) override {
    return channel_->Send(request, deadline, timeout, what);
  }
  std::vector<v1::AwaitedTrainer> awaited() const override { return channel_->awaited(); }
  void Leave() override { channel_->Leave(); }
  absl::Status StartFetch(int bucket) override;
  absl::Status Fetch(int bucket, bool started, absl::Duration timeout) override;
  absl::Status Drop(int bucket) override;

 private:
  AttachedPulling(std::shared_ptr<Job> job, Rank rank) : PullingChannel(std::move(job)), rank_(rank) {}

  const Rank rank_;
  std::unique_ptr<AttachedChannel> channel_;
};

}  // namespace shardmesh
