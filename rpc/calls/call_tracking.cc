#include "rpc/calls/call_tracking.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace shardmesh {
namespace {

class TrackingAllocator final : public grpc::ContextAllocator {
 public:
  explicit TrackingAllocator(std::shared_ptr<CallGuard> guard) : guard_(std::move(guard)) {}

  grpc::CallbackServerContext* NewCallbackServerContext() override { return Track(new grpc::CallbackServerContext); }
  grpc::GenericCallbackServerContext* NewGenericCallbackServerContext() override {
    return Track(new grpc::GenericCallbackServerContext);
  }
  void Release(grpc::CallbackServerContext* context) override {
    guard_->Ended(static_cast<grpc::ServerContextBase*>(context));
    delete context;
  }
  void Release(grpc::GenericCallbackServerContext* context) override {
    guard_->Ended(static_cast<grpc::ServerContextBase*>(context));
    delete context;
  }

 private:
  template <typename Context>
  Context* Track(Context* context) {
    guard_->Created(static_cast<grpc::ServerContextBase*>(context));
    return context;
  }

  const std::shared_ptr<CallGuard> guard_;
};

// Of one call that takes a single message. gRPC deserializes that before the handler runs; where it cannot, it ends the
// call itself, with the one status that no handler of ours gives: UNIMPLEMENTED without a text.
class UnparsedBody final : public grpc::experimental::Interceptor {
 public:
  explicit UnparsedBody(std::string method) : method_(std::move(method)) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = batch->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty()) {
        batch->ModifySendStatus(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, Text()));
      }
    }
    batch->Proceed();
  }

 private:
  std::string Text() const {
    const std::string name = absl::StrReplaceAll(absl::StripPrefix(method_, "/"), {{"/", "."}});
    const auto* method = google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name);
    return absl::StrCat("the body of the call ", name, " is no ",
                        method == nullptr ? "message of its kind" : method->input_type()->name(),
                        "; make it from the .proto files of this server's version");
  }

  const std::string method_;
};

class TrackingFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit TrackingFactory(std::shared_ptr<CallGuard> guard) : guard_(std::move(guard)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    guard_->Started(info->server_context(), info->server_context()->peer());
    using Type = grpc::experimental::ServerRpcInfo::Type;
    if (info->type() != Type::UNARY && info->type() != Type::SERVER_STREAMING) return nullptr;
    return new UnparsedBody(info->method());
  }

 private:
  const std::shared_ptr<CallGuard> guard_;
};

}  // namespace

void TrackCalls(std::shared_ptr<CallGuard> guard, grpc::ServerBuilder& builder) {
  builder.SetContextAllocator(std::make_unique<TrackingAllocator>(guard));
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<TrackingFactory>(std::move(guard)));
  builder.experimental().SetInterceptorCreators(std::move(factories));
}

}  // namespace shardmesh
