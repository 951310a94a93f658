// SeatSink: receives the bytes of one pushed gradient shard of a slot that a connected trainer took (seat_session.h),
// and puts them into the window that its seat writes. They are looked at when the slot is finished.
#pragma once

#include <memory>

#include "worker/doors/byte_sink.h"
#include "worker/doors/seat_session.h"

namespace shardmesh {

class SeatSink final : public ByteSink {
 public:
  // Errors of SeatSession::BeginPush. InvalidArgument: another job's session, no such shard, or another length.
  static absl::StatusOr<std::unique_ptr<ByteSink>> Begin(std::shared_ptr<SeatSession> session,
                                                          const v1::PushHeader& header);
  ~SeatSink() override;

  absl::Status CheckWanted() const override { return session_->shard().CheckOpen(); }
  absl::Status Append(absl::string_view bytes) override;
  absl::StatusOr<v1::PushReply> Finish() override;

 private:
  SeatSink(std::shared_ptr<SeatSession> session, const v1::PushHeader& header, SeatSession::Push push)
      : session_(std::move(session)), header_(header), push_(push) {}

  const std::shared_ptr<SeatSession> session_;
  const v1::PushHeader header_;
  const SeatSession::Push push_;
  bool complete_ = false;
  int64_t received_ = 0;
  int bucket_ = 0;         // where the next byte goes
  int64_t in_bucket_ = 0;  // bytes of this bucket's shard received
};

}  // namespace shardmesh
