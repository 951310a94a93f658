// SeatTransport: a connected trainer's seat at a worker, as one open call (Shard.Seat): the trainer has it as long as
// the call lives, and the workers see at once when this process ends. Thread-safe.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {

class SeatTransport final : private grpc::ClientReadReactor<v1::SeatReply> {
 public:
  // Errors of Shard.Seat. DeadlineExceeded: no answer in time.
  static absl::StatusOr<std::unique_ptr<SeatTransport>> Open(const std::shared_ptr<grpc::Channel>& channel,
                                                             const v1::SeatRequest& request, absl::Duration timeout);
  ~SeatTransport() override;  // leaves, and waits until the call is over
  SeatTransport(const SeatTransport&) = delete;

  const v1::SeatReply& reply() const { return reply_; }
  void Leave() { context_.TryCancel(); }
  // Whether the seat is lost: the call is over, or is within `patience`.
  bool AwaitOver(absl::Duration patience);

 private:
  explicit SeatTransport(const v1::SeatRequest& request) : request_(request) {}
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  const v1::SeatRequest request_;
  v1::SeatReply reply_, more_;
  grpc::ClientContext context_;
  Mutex mu_;
  CondVar changed_;
  bool seated_ ABSL_GUARDED_BY(mu_) = false, over_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
