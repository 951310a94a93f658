#include "worker/doors/progress_call.h"

#include <utility>

#include "core/base/status.h"
#include "core/base/thread.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(200);
}  // namespace

grpc::ServerWriteReactor<v1::FileProgress>* ProgressCall::Start(const absl::Status& status, Work work) {
  auto* const call = new ProgressCall();
  if (!status.ok()) {
    call->Finish(ToGrpc(status));
    return call;
  }
  absl::StatusOr<std::thread> thread =
      StartThread("a call that saves or loads", [call, work = std::move(work)] { call->Run(work); });
  if (thread.ok()) {
    call->thread_ = *std::move(thread);
  } else {
    call->Finish(ToGrpc(thread.status()));
  }
  return call;
}

void ProgressCall::Run(const Work& work) {
  absl::Status status = CallWithoutThrowing(
      [&] { return work(cancelled_, [this](const v1::FileProgress& progress) { return Report(progress); }); });
  if (status.ok()) status = AwaitSent();
  AwaitSent().IgnoreError();
  Finish(ToGrpc(status));
}

absl::Status ProgressCall::AwaitSent() {
  MutexLock lock(mu_);
  while (sending_) sent_.WaitFor(mu_, kSlice);  // a write ends: at the call's deadline at the latest
  return cancelled_.load() ? absl::CancelledError("the caller is gone") : absl::OkStatus();
}

absl::Status ProgressCall::Report(const v1::FileProgress& progress) {
  RETURN_IF_ERROR(AwaitSent());
  {
    MutexLock lock(mu_);
    sending_ = true;
  }
  message_ = progress;
  StartWrite(&message_);
  return absl::OkStatus();
}

void ProgressCall::OnWriteDone(bool ok) {
  if (!ok) cancelled_.store(true);
  MutexLock lock(mu_);
  sending_ = false;
  sent_.SignalAll();
}

void ProgressCall::OnCancel() { cancelled_.store(true); }

void ProgressCall::OnDone() {
  if (thread_.joinable()) thread_.join();
  delete this;
}

}  // namespace shardmesh
