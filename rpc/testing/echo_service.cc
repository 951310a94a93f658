#include "rpc/testing/echo_service.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/base/clock.h"
#include "rpc/base/unary.h"

namespace shardmesh::testing {

using rpc::testing::EchoRequest;
using rpc::testing::EchoResponse;

// Shared by the reactor and the service, so that a release after a cancellation finds no dead reactor.
class HeldCall {
 public:
  explicit HeldCall(grpc::ServerUnaryReactor* reactor) : reactor_(reactor) {}
  void Finish(const grpc::Status& status) {
    MutexLock lock(mu_);
    if (reactor_ != nullptr) std::exchange(reactor_, nullptr)->Finish(status);
  }

 private:
  Mutex mu_;
  grpc::ServerUnaryReactor* reactor_ ABSL_GUARDED_BY(mu_);
};

namespace {

absl::Status Answer(const EchoRequest& request, EchoResponse* response) {
  if (!request.throw_text().empty()) throw std::runtime_error(request.throw_text());
  response->set_text(request.text());
  return absl::OkStatus();
}

class HoldReactor final : public grpc::ServerUnaryReactor {
 public:
  HoldReactor() : call_(std::make_shared<HeldCall>(this)) {}
  const std::shared_ptr<HeldCall>& call() const { return call_; }
  void OnCancel() override { call_->Finish(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

 private:
  std::shared_ptr<HeldCall> call_;
};

class CollectReactor final : public grpc::ServerReadReactor<EchoRequest> {
 public:
  CollectReactor(const grpc::CallbackServerContext& context, EchoResponse* response) : response_(response) {
    if (const absl::Status status = RequireDeadline(context, "Echo.Collect"); !status.ok()) {
      Finish(ToGrpc(status));
    } else {
      StartRead(&request_);
    }
  }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    response_->mutable_text()->append(request_.text());
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  EchoRequest request_;
  EchoResponse* response_;
};

}  // namespace

EchoService::~EchoService() = default;

grpc::ServerUnaryReactor* EchoService::Echo(grpc::CallbackServerContext* context, const EchoRequest* request,
                                            EchoResponse* response) {
  if (!request->hold()) return Unary(context, request, response, Answer);
  response->set_text(request->text());
  auto* reactor = new HoldReactor;
  const std::shared_ptr<HeldCall> call = reactor->call();
  MutexLock lock(mu_);
  if (released_) {
    call->Finish(grpc::Status::OK);
  } else {
    held_.push_back(call);
    changed_.SignalAll();
  }
  return reactor;
}

grpc::ServerReadReactor<EchoRequest>* EchoService::Collect(grpc::CallbackServerContext* context,
                                                           EchoResponse* response) {
  return new CollectReactor(*context, response);
}

bool EchoService::WaitForHeld(size_t num_calls) {
  const absl::Time until = MonotonicNow() + absl::Seconds(10);
  MutexLock lock(mu_);
  while (held_.size() < num_calls) {
    if (MonotonicNow() >= until) return false;
    changed_.WaitFor(mu_, until - MonotonicNow());
  }
  return true;
}

void EchoService::Release() {
  std::vector<std::shared_ptr<HeldCall>> held;
  {
    MutexLock lock(mu_);
    released_ = true;
    held.swap(held_);
  }
  for (const auto& call : held) call->Finish(grpc::Status::OK);
}

}  // namespace shardmesh::testing
