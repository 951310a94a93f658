#include "worker/push_call.h"

#include "core/status.h"
#include "proto/bulk.h"
#include "proto/validate.h"
#include "rpc/status.h"
#include "rpc/unary.h"

namespace shardmesh {

PushCall::PushCall(Worker& worker, grpc::ByteBuffer* reply, const absl::Status& refusal)
    : worker_(worker), reply_(reply) {
  if (refusal.ok()) {
    StartRead(&message_);
  } else {
    Finish(ToGrpc(refusal));
  }
}

void PushCall::OnReadDone(bool ok) {
  if (!ok) return Complete();
  const absl::Status status = CallWithoutThrowing([this] { return Consume(); });
  message_.Clear();
  if (!status.ok()) {
    sink_.reset();
    Finish(ToGrpc(status));
    return;
  }
  StartRead(&message_);
}

absl::Status PushCall::Consume() {
  std::string header;
  bool has_header = false;
  // The header stands before the data in the first message, so it is opened when the first byte of data comes.
  const auto open = [&]() -> absl::Status {
    if (sink_ != nullptr) return absl::OkStatus();
    if (!has_header)
      return absl::InvalidArgumentError("the first message of a push has no header; put one before the data");
    return Open(header);
  };
  const bool first = sink_ == nullptr;
  RETURN_IF_ERROR(DecodeChunk(message_, header, has_header, [&](absl::string_view bytes) -> absl::Status {
    RETURN_IF_ERROR(open());
    return sink_->Append(bytes);
  }));
  if (!first && has_header)
    return absl::InvalidArgumentError("a second header in one push; only the first message has one");
  return open();
}

absl::Status PushCall::Open(const std::string& header) {
  v1::PushHeader parsed;
  if (!parsed.ParseFromString(header)) return absl::InvalidArgumentError("the header of a push cannot be parsed");
  RETURN_IF_ERROR(Validate(parsed));
  ASSIGN_OR_RETURN(std::shared_ptr<JobShard> shard, worker_.Find(parsed.job()));
  ASSIGN_OR_RETURN(sink_, PushSink::Begin(std::move(shard), parsed));
  return absl::OkStatus();
}

// The client ended its stream, or the connection broke: in both cases the byte count says whether the piece is whole.
void PushCall::Complete() {
  if (sink_ == nullptr) {
    Finish(ToGrpc(absl::InvalidArgumentError("a push without any message; send a header and the piece's bytes")));
    return;
  }
  const absl::Status status = CallWithoutThrowing([this]() -> absl::Status {
    ASSIGN_OR_RETURN(const v1::PushReply reply, sink_->Finish());
    *reply_ = EncodeMessage(reply);
    return absl::OkStatus();
  });
  sink_.reset();
  Finish(ToGrpc(status));
}

}  // namespace shardmesh
