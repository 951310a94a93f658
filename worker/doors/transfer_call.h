// TransferCall: one Transfer call: sends what TransferSource reads, message after message. Each holds a copy, since a
// stretch is seldom longer than some KiB.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/status/statusor.h"
#include "worker/move/reform.h"

namespace shardmesh {

class TransferCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  // Returns the reactor for gRPC. An error: the call is answered with it, and there is no source.
  static grpc::ServerWriteReactor<grpc::ByteBuffer>* Start(const absl::Status& status,
                                                           std::unique_ptr<TransferSource> source);

  void OnWriteDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  void SendNext();
  absl::Status MakeNext();

  std::unique_ptr<TransferSource> source_;
  bool begun_ = false, ended_ = false;
  grpc::ByteBuffer message_;  // being written
};

}  // namespace shardmesh
