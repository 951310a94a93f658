#include "worker/doors/push_call.h"

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "proto/bulk.h"
#include "proto/validate.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"
#include "worker/doors/push_sink.h"
#include "worker/doors/seat_sink.h"
#include "worker/doors/stalled_call.h"

namespace shardmesh {

grpc::ServerReadReactor<grpc::ByteBuffer>* PushCall::Start(Worker& worker, const SeatSessions& seats,
                                                           grpc::ByteBuffer* reply, const absl::Status& refusal) {
  std::shared_ptr<PushCall> call(new PushCall(worker, seats, reply));
  call->self_ = call;
  if (!refusal.ok()) {
    call->Finish(ToGrpc(refusal));
    return call.get();
  }
  call->Read();
  LookAtCall([weak = std::weak_ptr<PushCall>(call)] {
    const std::shared_ptr<PushCall> looked_at = weak.lock();
    return looked_at != nullptr && looked_at->LookForStall();
  });
  return call.get();
}

void PushCall::Read() {
  {
    MutexLock lock(mu_);
    reading_ = true;
    asked_ = MonotonicNow();
  }
  StartRead(&message_);
}

void PushCall::OnReadDone(bool ok) {
  {
    MutexLock lock(mu_);
    if (answered_) return;  // it stood still
    reading_ = false;
  }
  if (!ok) return Complete();
  const absl::Status status = CallWithoutThrowing([this] { return Consume(); });
  message_.Clear();
  if (status.ok()) return Read();
  sink_.reset();
  Finish(ToGrpc(status));
}

absl::Status PushCall::Stalled() {
  if (sink_ == nullptr) return absl::OkStatus();  // it has nothing
  RETURN_IF_ERROR(sink_->CheckWanted());
  const absl::Duration silence = MonotonicNow() - asked_, patience = kPushSilence * worker_.heartbeat_timeout();
  if (silence < patience) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("no data of this push came for ", absl::FormatDuration(patience),
                                         ", so others may push the same; push again from the first byte"));
}

bool PushCall::LookForStall() {
  absl::Status over;
  std::unique_ptr<ByteSink> sink;
  {
    MutexLock lock(mu_);
    if (answered_) return false;
    if (!reading_) return true;
    over = Stalled();
    if (over.ok()) return true;
    answered_ = true;
    sink = std::move(sink_);
  }
  sink.reset();  // before the answer: who reads that may push again
  Finish(ToGrpc(over));
  return false;
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
  if (parsed.session() != 0) {
    ASSIGN_OR_RETURN(std::shared_ptr<SeatSession> session, seats_.Find(parsed.session()));
    ASSIGN_OR_RETURN(sink_, SeatSink::Begin(std::move(session), parsed));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(std::shared_ptr<JobShard> shard, worker_.Find(parsed.job()));
  ASSIGN_OR_RETURN(sink_, PushSink::Begin(std::move(shard), parsed));
  return absl::OkStatus();
}

// The client ended its stream, or the connection broke: in both cases the byte count says whether all has come.
void PushCall::Complete() {
  if (sink_ == nullptr) {
    Finish(ToGrpc(
        absl::InvalidArgumentError("a push without any message; send a header and the bytes that it announces")));
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
