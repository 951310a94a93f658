#include "worker/relay/hosts_transport.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/transport_reconnect.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "rpc/base/deadline.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kLongestCall = absl::Hours(1);  // then another one begins
}  // namespace

struct HostsTransport::Call {
  ~Call() {
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }
  // So many operations of the call have ended, all well. False: one has not, or not in time.
  bool Await(int operations, absl::Time until) {
    bool well = true;
    for (; operations > 0; --operations) {
      void* tag = nullptr;
      bool ok = false;
      if (queue.AsyncNext(&tag, &ok, DeadlineIn(until - MonotonicNow())) != grpc::CompletionQueue::GOT_EVENT) {
        left = operations;
        return false;
      }
      well = well && ok;
    }
    return well;
  }

  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::HostHeartbeats, v1::HostHeartbeatReplies>> stream;
  v1::HostHeartbeatReplies reply;  // where one is read to while the call is there
  int left = 0;                    // operations that have not ended
};

HostsTransport::HostsTransport(std::string address, TlsOptions tls, absl::Duration timeout,
                               std::shared_ptr<grpc::Channel> channel)
    : address_(std::move(address)),
      tls_(std::move(tls)),
      timeout_(timeout),
      channel_(std::move(channel)),
      stub_(v1::Hosts::NewStub(channel_)) {}

HostsTransport::~HostsTransport() {
  if (call_ != nullptr) End(absl::OkStatus()).IgnoreError();
}

absl::StatusOr<std::unique_ptr<HostsTransport>> HostsTransport::Dial(const std::string& coordinator,
                                                                     const TlsOptions& tls, absl::Duration timeout) {
  ChannelOptions options;
  options.measures_bandwidth = false;
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, NewChannel(coordinator, tls, options));
  return std::unique_ptr<HostsTransport>(new HostsTransport(coordinator, tls, timeout, std::move(channel)));
}

absl::Status HostsTransport::Begin() {
  HelpReconnect(*channel_, timeout_);
  call_ = std::make_unique<Call>();
  call_->context.set_deadline(DeadlineIn(kLongestCall));
  call_->stream = stub_->PrepareAsyncHeartbeats(&call_->context, &call_->queue);
  call_->stream->StartCall(nullptr);
  if (call_->Await(1, MonotonicNow() + timeout_)) return absl::OkStatus();
  return End(absl::DeadlineExceededError(absl::StrCat("no connection within ", absl::FormatDuration(timeout_))));
}

// What gRPC says is the cause where the other end said why, which it may do late or never: then the call is cancelled, and
// ends at once.
absl::Status HostsTransport::End(absl::Status cause) {
  const std::string named = absl::StrCat("coordinator Hosts.Heartbeats at ", address_);
  if (call_->left > 0) {
    call_->context.TryCancel();
    call_->Await(call_->left, absl::InfiniteFuture());
    call_.reset();
    return Annotate(cause, named);
  }
  if (cause.ok()) call_->context.TryCancel();
  grpc::Status ended;
  call_->stream->Finish(&ended, nullptr);
  if (!call_->Await(1, MonotonicNow() + timeout_) && call_->left > 0) {
    call_->context.TryCancel();
    call_->Await(1, absl::InfiniteFuture());
    if (ended.error_code() == grpc::StatusCode::CANCELLED) ended = grpc::Status::OK;  // by this end: it says nothing
  }
  call_.reset();
  if (cause.ok()) return cause;
  const absl::Status status = ExplainTlsFailure(FromGrpc(ended, named), tls_);
  return status.ok() ? Annotate(cause, named) : status;
}

absl::StatusOr<v1::HostHeartbeatReplies> HostsTransport::Exchange(const v1::HostHeartbeats& message, bool anew) {
  if (anew && call_ != nullptr) End(absl::OkStatus()).IgnoreError();
  if (call_ == nullptr) RETURN_IF_ERROR(Begin());
  call_->stream->Write(message, nullptr);
  call_->stream->Read(&call_->reply, nullptr);
  RETURN_IF_ERROR(AwaitOrEnd(2, "no reply"));
  return std::move(call_->reply);
}

// A process that ends closes its connections.
bool HostsTransport::Stands() const {
  return call_ != nullptr && channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
}

absl::Status HostsTransport::AwaitOrEnd(int operations, const char* what) {
  if (call_->Await(operations, MonotonicNow() + timeout_)) return absl::OkStatus();
  if (call_->left == 0) return End(absl::UnavailableError("the call has ended"));
  return End(absl::DeadlineExceededError(absl::StrCat(what, " within ", absl::FormatDuration(timeout_))));
}

}  // namespace shardmesh
