// EchoService: the callback service the tests of rpc/ serve. Tests only. Thread-safe.
#pragma once

#include <vector>

#include "core/base/sync.h"
#include "rpc/testing/echo.grpc.pb.h"

namespace shardmesh::testing {

class HeldCall;

class EchoService final : public rpc::testing::Echo::CallbackService {
 public:
  ~EchoService() override;
  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context, const rpc::testing::EchoRequest* request,
                                 rpc::testing::EchoResponse* response) override;
  grpc::ServerReadReactor<rpc::testing::EchoRequest>* Collect(grpc::CallbackServerContext* context,
                                                              rpc::testing::EchoResponse* response) override;

  // Waits until `num_calls` calls are held; false when that takes more than 10 s.
  bool WaitForHeld(size_t num_calls) ABSL_LOCKS_EXCLUDED(mu_);
  // Lets the held calls, and all later ones, end with OK.
  void Release() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  CondVar changed_;
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::shared_ptr<HeldCall>> held_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh::testing
