#include "rpc/call_tracking.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <utility>
#include <vector>

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

class TrackingFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit TrackingFactory(std::shared_ptr<CallGuard> guard) : guard_(std::move(guard)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    guard_->Started(info->server_context(), info->server_context()->peer());
    return nullptr;
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
