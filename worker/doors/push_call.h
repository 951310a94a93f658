// PushCall: one Push stream: its first message opens a ByteSink, every message's bytes go into it as they lie in
// gRPC's buffers, and the end of the stream finishes it. A stream that breaks leaves nothing declared, and one that
// stands still, or whose job is deleted, is ended: another push of the same bytes may begin.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <string>

#include "core/base/sync.h"
#include "worker/doors/byte_sink.h"
#include "worker/doors/seat_session.h"
#include "worker/process/worker.h"

namespace shardmesh {

class PushCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  // Returns the reactor for gRPC. `refusal`: answer with it at once.
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(Worker& worker, const SeatSessions& seats,
                                                          grpc::ByteBuffer* reply, const absl::Status& refusal);

  void OnReadDone(bool ok) override;
  void OnCancel() override {}
  void OnDone() override { const std::shared_ptr<PushCall> last = std::move(self_); }

 private:
  PushCall(Worker& worker, const SeatSessions& seats, grpc::ByteBuffer* reply)
      : worker_(worker), seats_(seats), reply_(reply) {}
  void Read();
  absl::Status Consume();
  absl::Status Open(const std::string& header);
  void Complete();
  // What ends it while the next message is waited for. False: it has ended.
  bool LookForStall();
  absl::Status Stalled() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Worker& worker_;
  const SeatSessions& seats_;
  grpc::ByteBuffer* const reply_;
  std::shared_ptr<PushCall> self_;  // gRPC's reference
  grpc::ByteBuffer message_;
  std::unique_ptr<ByteSink> sink_;  // of whoever set reading_ to false
  Mutex mu_;
  bool reading_ ABSL_GUARDED_BY(mu_) = false;  // the next message is waited for
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time asked_ ABSL_GUARDED_BY(mu_);  // for that message
};

}  // namespace shardmesh
