#include "server/service/hosts_service.h"

#include <spdlog/spdlog.h>

#include "absl/status/status.h"
#include "core/base/status.h"
#include "rpc/base/main_support.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"
#include "rpc/calls/caller.h"

namespace shardmesh {
// One operation at a time: it reads a message, answers, and reads the next.
class HostsService::Call final : public grpc::ServerBidiReactor<v1::HostHeartbeats, v1::HostHeartbeatReplies> {
 public:
  Call(HostsService& service, grpc::CallbackServerContext* context) : service_(service), context_(context) {
    host_.call = service_.Began(context);
    if (const absl::Status status = RequireDeadline(*context, "Hosts.Heartbeats"); !status.ok()) {
      Finish(ToGrpc(status));
    } else {
      spdlog::info("event=host_heartbeats_begin caller={}", Quoted(CallerOf(*context)));
      StartRead(&request_);
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    const absl::Status answered = CallWithoutThrowing([this] { return Answer(); });
    if (!answered.ok()) return Finish(ToGrpc(answered));
    StartWrite(&reply_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(ToGrpc(absl::CancelledError("the caller is gone")));
    StartRead(&request_);
  }
  void OnDone() override {
    service_.Ended(context_, host_);
    delete this;
  }

 private:
  absl::Status Answer() {
    reply_.Clear();
    return service_.coordinator_.Heartbeats(request_, host_, reply_);
  }

  HostsService& service_;
  grpc::CallbackServerContext* const context_;
  KnownHost host_;
  v1::HostHeartbeats request_;
  v1::HostHeartbeatReplies reply_;
};

grpc::ServerBidiReactor<v1::HostHeartbeats, v1::HostHeartbeatReplies>* HostsService::Heartbeats(
    grpc::CallbackServerContext* context) {
  return new Call(*this, context);
}

uint64_t HostsService::Began(grpc::CallbackServerContext* context) {
  MutexLock lock(mu_);
  open_.insert(context);
  if (ended_) context->TryCancel();
  return ++calls_;
}

// A call that this process ends tells nothing of the host.
void HostsService::Ended(grpc::CallbackServerContext* context, const KnownHost& host) {
  {
    MutexLock lock(mu_);
    open_.erase(context);
    if (ended_) return;
  }
  coordinator_.EndCall(host);
}

void HostsService::End() {
  MutexLock lock(mu_);
  ended_ = true;
  for (grpc::CallbackServerContext* const context : open_) context->TryCancel();
}

}  // namespace shardmesh
