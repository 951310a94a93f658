#include "worker/doors/seat_call.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "core/base/status.h"
#include "core/base/thread.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"
#include "worker/doors/waiting_call.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(200);
}  // namespace

grpc::ServerWriteReactor<v1::SeatReply>* SeatCall::Start(absl::StatusOr<std::shared_ptr<JobShard>> shard,
                                                         LocalServer& local, SeatSessions& sessions) {
  auto* const call = new SeatCall(local, sessions);
  if (!shard.ok()) {
    call->Finish(ToGrpc(shard.status()));
    return call;
  }
  if (const absl::Status entered = sessions.Enter(); !entered.ok()) {
    call->Finish(ToGrpc(entered));
    return call;
  }
  absl::StatusOr<std::thread> thread =
      StartThread("a connected trainer's seat", [call, shard = *std::move(shard), &sessions] {
        const absl::Status status = CallWithoutThrowing([&] { return call->Run(shard); });
        sessions.Leave();
        call->Finish(ToGrpc(status));
      });
  if (thread.ok()) {
    call->thread_ = *std::move(thread);
  } else {
    sessions.Leave();
    call->Finish(ToGrpc(thread.status()));
  }
  return call;
}

absl::Status SeatCall::Run(const std::shared_ptr<JobShard>& shard) {
  ASSIGN_OR_RETURN(const LocalServer::HeldSeat seat, local_.TakeSeat(shard));
  const auto session = std::make_shared<SeatSession>(shard, seat.seat, seat.holder);
  bool gone;
  {
    MutexLock lock(mu_);
    session_ = session;
    gone = cancelled_;
  }
  absl::Status status;
  if (!gone) {
    sessions_.Add(session);
    status = Serve(*session);
    sessions_.Remove(*session);
  }
  local_.GiveSeatBack(*shard, seat);
  return status;
}

absl::Status SeatCall::Serve(SeatSession& session) {
  const std::string& job = session.shard().spec().name;
  spdlog::info("event=trainer_connected job={} seat={}", job, session.seat());
  message_.set_session(session.id());
  message_.set_seat(session.seat());
  message_.set_committed_step(session.shard().protocol().committed_step().value());
  {
    MutexLock lock(mu_);
    writing_ = true;
  }
  StartWrite(&message_);
  const absl::Status status = session.Run();
  spdlog::info("event=trainer_gone job={} seat={}", job, session.seat());
  MutexLock lock(mu_);
  while (writing_) written_.WaitFor(mu_, kSlice);  // it is small, and ends with the call at the latest
  return status;
}

void SeatCall::OnWriteDone(bool) {
  MutexLock lock(mu_);
  writing_ = false;
  written_.SignalAll();
}

void SeatCall::OnCancel() {
  std::shared_ptr<SeatSession> session;
  {
    MutexLock lock(mu_);
    cancelled_ = true;
    session = session_;
  }
  if (session != nullptr) session->End();
}

void SeatCall::OnDone() {
  if (thread_.joinable()) thread_.join();
  delete this;
}

grpc::ServerUnaryReactor* SeatRequestCall::Start(grpc::CallbackServerContext& context, SeatSession& session,
                                                 const v1::TrainerRequest& request, v1::TrainerReply* reply) {
  std::shared_ptr<SeatRequestCall> call(new SeatRequestCall(reply));
  call->self_ = call;
  reply->set_id(request.id());
  session.Ask(request.slot(), AnswerBy(context),
              [call](const absl::StatusOr<v1::SlotReply>& answer) { call->Answer(answer); });
  return call.get();
}

void SeatRequestCall::Answer(const absl::StatusOr<v1::SlotReply>& answer) {
  MutexLock lock(mu_);
  if (answered_) return;
  answered_ = true;
  if (answer.ok()) *reply_->mutable_slot() = *answer;
  Finish(ToGrpc(answer.status()));
}

// The seat's thread may go on with it: a slot that it takes is the trainer's, who asks for it again.
void SeatRequestCall::OnCancel() {
  MutexLock lock(mu_);
  if (answered_) return;
  answered_ = true;
  Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller cancelled"));
}

}  // namespace shardmesh
