// PushCall: one Push stream: its first message opens a PushSink, every message's bytes go into it as they lie in gRPC's
// buffers, and the end of the stream finishes it. A stream that breaks leaves nothing declared.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <string>

#include "worker/push_sink.h"
#include "worker/worker.h"

namespace shardmesh {

class PushCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  // Deletes itself when the call is done. `refusal`: answer with it at once.
  PushCall(Worker& worker, grpc::ByteBuffer* reply, const absl::Status& refusal);

  void OnReadDone(bool ok) override;
  void OnCancel() override {}
  void OnDone() override { delete this; }

 private:
  absl::Status Consume();
  absl::Status Open(const std::string& header);
  void Complete();

  Worker& worker_;
  grpc::ByteBuffer* const reply_;
  grpc::ByteBuffer message_;
  std::unique_ptr<PushSink> sink_;
};

}  // namespace shardmesh
