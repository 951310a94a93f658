#include "client/cpp/transport/seat_transport.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"
#include "rpc/base/status.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(200);
}  // namespace

absl::StatusOr<std::unique_ptr<SeatTransport>> SeatTransport::Open(const std::shared_ptr<grpc::Channel>& channel,
                                                                   const v1::SeatRequest& request,
                                                                   absl::Duration timeout) {
  std::unique_ptr<SeatTransport> seat(new SeatTransport(request));
  const std::unique_ptr<v1::Shard::Stub> stub = v1::Shard::NewStub(channel);
  stub->async()->Seat(&seat->context_, &seat->request_, seat.get());
  seat->StartRead(&seat->reply_);
  seat->StartCall();
  const absl::Time deadline = MonotonicNow() + timeout;
  {
    MutexLock lock(seat->mu_);
    while (!seat->seated_ && !seat->over_ && MonotonicNow() < deadline) {
      seat->changed_.WaitFor(seat->mu_, std::min(kSlice, deadline - MonotonicNow()));
    }
    if (seat->seated_) return seat;
    if (!seat->over_) {
      return absl::DeadlineExceededError(absl::StrCat("no seat was given within ", absl::FormatDuration(timeout)));
    }
    if (!seat->status_.ok()) return FromGrpc(seat->status_, "Seat");
  }
  return absl::InternalError("a call of Seat ended without a seat");
}

SeatTransport::~SeatTransport() {
  Leave();
  MutexLock lock(mu_);
  while (!over_) changed_.WaitFor(mu_, kSlice);
}

bool SeatTransport::AwaitOver(absl::Duration patience) {
  const absl::Time deadline = MonotonicNow() + patience;
  MutexLock lock(mu_);
  while (!over_ && MonotonicNow() < deadline) changed_.WaitFor(mu_, deadline - MonotonicNow());
  return over_;
}

// There is one answer, and behind it nothing to read but the end.
void SeatTransport::OnReadDone(bool ok) {
  if (!ok) return;
  {
    MutexLock lock(mu_);
    seated_ = true;
    changed_.SignalAll();
  }
  StartRead(&more_);
}

void SeatTransport::OnDone(const grpc::Status& status) {
  MutexLock lock(mu_);
  status_ = status;
  over_ = true;
  changed_.SignalAll();
}

}  // namespace shardmesh
