// SeatCall: one Shard.Seat: takes a seat for its caller and has it as long as the call is open. SeatRequestCall: one
// Shard.Trainer of that seat, which waits without a thread of its own: the seat's answers it.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <thread>

#include "core/base/sync.h"
#include "worker/doors/local_server.h"
#include "worker/doors/seat_session.h"

namespace shardmesh {

class SeatCall final : public grpc::ServerWriteReactor<v1::SeatReply> {
 public:
  // The reactor to return to gRPC. Borrowed arguments outlive the server.
  static grpc::ServerWriteReactor<v1::SeatReply>* Start(absl::StatusOr<std::shared_ptr<JobShard>> shard,
                                                        LocalServer& local, SeatSessions& sessions);
  void OnWriteDone(bool ok) override;  // a caller that is gone is told of by OnCancel
  void OnCancel() override;
  void OnDone() override;

 private:
  SeatCall(LocalServer& local, SeatSessions& sessions) : local_(local), sessions_(sessions) {}
  absl::Status Run(const std::shared_ptr<JobShard>& shard);
  absl::Status Serve(SeatSession& session);

  LocalServer& local_;
  SeatSessions& sessions_;
  v1::SeatReply message_;
  std::thread thread_;
  Mutex mu_;
  CondVar written_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false, writing_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<SeatSession> session_ ABSL_GUARDED_BY(mu_);
};

class SeatRequestCall final : public grpc::ServerUnaryReactor {
 public:
  static grpc::ServerUnaryReactor* Start(grpc::CallbackServerContext& context, SeatSession& session,
                                         const v1::TrainerRequest& request, v1::TrainerReply* reply);
  void OnCancel() override;
  void OnDone() override { const std::shared_ptr<SeatRequestCall> last = std::move(self_); }

 private:
  explicit SeatRequestCall(v1::TrainerReply* reply) : reply_(reply) {}
  void Answer(const absl::StatusOr<v1::SlotReply>& answer);

  v1::TrainerReply* const reply_;
  std::shared_ptr<SeatRequestCall> self_;  // gRPC's reference
  Mutex mu_;
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace shardmesh
