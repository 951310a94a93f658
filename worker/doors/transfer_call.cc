#include "worker/doors/transfer_call.h"

#include <algorithm>
#include <utility>

#include "proto/bulk.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"

namespace shardmesh {
namespace {
constexpr int64_t kMessageBytes = 1 << 20;
}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* TransferCall::Start(const absl::Status& status,
                                                                std::unique_ptr<TransferSource> source) {
  auto* const call = new TransferCall();
  if (!status.ok()) {
    call->Finish(ToGrpc(status));
    return call;
  }
  call->source_ = std::move(source);
  call->SendNext();
  return call;
}

absl::Status TransferCall::MakeNext() {
  std::string header;
  grpc::Slice data;
  if (!std::exchange(begun_, true)) {
    header = source_->Begin().SerializeAsString();
  } else if (source_->left() > 0) {
    data = grpc::Slice(static_cast<size_t>(std::min(kMessageBytes, source_->left())));
    source_->Read(reinterpret_cast<char*>(const_cast<uint8_t*>(data.begin())), static_cast<int64_t>(data.size()));
  } else {
    header = source_->End().SerializeAsString();
    ended_ = true;
  }
  message_ = EncodeChunk(header, data);
  return absl::OkStatus();
}

// Memory may be short just then.
void TransferCall::SendNext() {
  if (const absl::Status made = CallWithoutThrowing([this] { return MakeNext(); }); !made.ok()) {
    Finish(ToGrpc(made));
  } else {
    StartWrite(&message_);
  }
}

void TransferCall::OnWriteDone(bool ok) {
  message_.Clear();
  if (!ok) {
    Finish(ToGrpc(absl::CancelledError("the caller is gone")));
  } else if (ended_) {
    Finish(grpc::Status::OK);
  } else {
    SendNext();
  }
}

}  // namespace shardmesh
