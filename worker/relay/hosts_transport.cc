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

// A read is always under way, so that the end of the call is noticed when it comes.
struct HostsTransport::Call {
  enum Operation : uintptr_t { kBegin = 1, kWrite = 2, kRead = 4, kFinish = 8 };

  ~Call() {
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }
  void* Start(Operation operation) {
    under_way |= operation;
    return reinterpret_cast<void*>(operation);
  }
  // None of these operations is under way any more. False: one is, at `until`.
  bool Await(uintptr_t operations, absl::Time until) {
    while ((under_way & operations) != 0) {
      void* tag = nullptr;
      bool ok = false;
      if (queue.AsyncNext(&tag, &ok, DeadlineIn(until - MonotonicNow())) != grpc::CompletionQueue::GOT_EVENT)
        return false;
      under_way &= ~reinterpret_cast<uintptr_t>(tag);
      ended = ended || !ok;
    }
    return true;
  }

  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::HostHeartbeats, v1::HostHeartbeatReplies>> stream;
  v1::HostHeartbeatReplies reply;  // where one is read to while the call is there
  uintptr_t under_way = 0;         // operations
  bool ended = false;              // one could not be done: the other end, or the connection, is gone
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
  call_->stream->StartCall(call_->Start(Call::kBegin));
  if (!call_->Await(Call::kBegin, MonotonicNow() + timeout_) || call_->ended) {
    return End(absl::DeadlineExceededError(absl::StrCat("no connection within ", absl::FormatDuration(timeout_))));
  }
  call_->stream->Read(&call_->reply, call_->Start(Call::kRead));
  return absl::OkStatus();
}

// What gRPC says is the cause where the other end said why, which it may do late or never: then the call is cancelled, and
// ends at once.
absl::Status HostsTransport::End(absl::Status cause) {
  const std::string named = absl::StrCat("coordinator Hosts.Heartbeats at ", address_);
  const bool cancelled = !call_->ended;
  if (cancelled) {
    call_->context.TryCancel();
    call_->Await(call_->under_way, absl::InfiniteFuture());
  }
  grpc::Status ended;
  call_->stream->Finish(&ended, call_->Start(Call::kFinish));
  bool by_this_end = cancelled;
  if (!call_->Await(call_->under_way, MonotonicNow() + timeout_)) {
    call_->context.TryCancel();
    call_->Await(call_->under_way, absl::InfiniteFuture());
    by_this_end = true;
  }
  call_.reset();
  if (cause.ok()) return cause;
  if (by_this_end && ended.error_code() == grpc::StatusCode::CANCELLED) return Annotate(cause, named);
  const absl::Status status = ExplainTlsFailure(FromGrpc(ended, named), tls_);
  return status.ok() ? Annotate(cause, named) : status;
}

absl::StatusOr<v1::HostHeartbeatReplies> HostsTransport::Exchange(const v1::HostHeartbeats& message, bool anew) {
  if (call_ != nullptr && anew) End(absl::OkStatus()).IgnoreError();
  if (call_ == nullptr) RETURN_IF_ERROR(Begin());
  if (call_->Await(Call::kRead, MonotonicNow())) return End(absl::UnavailableError("the call has ended"));
  call_->stream->Write(message, call_->Start(Call::kWrite));
  const bool done = call_->Await(Call::kWrite | Call::kRead, MonotonicNow() + timeout_);
  if (call_->ended) return End(absl::UnavailableError("the call has ended"));
  if (!done) return End(absl::DeadlineExceededError(absl::StrCat("no reply within ", absl::FormatDuration(timeout_))));
  v1::HostHeartbeatReplies reply = std::move(call_->reply);
  call_->reply.Clear();
  call_->stream->Read(&call_->reply, call_->Start(Call::kRead));
  return reply;
}

// A reply that nobody has asked for is the end, too.
bool HostsTransport::Stands() {
  if (call_ == nullptr || call_->Await(Call::kRead, MonotonicNow())) return false;
  return channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
}

}  // namespace shardmesh
