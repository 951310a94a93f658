// ProgressCall: a call that takes a while, on a thread of its own, and streams how far it is. It ends soon after its
// caller is gone or its deadline has passed.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "core/base/sync.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/move/shard_files.h"

namespace shardmesh {

class ProgressCall final : public grpc::ServerWriteReactor<v1::FileProgress> {
 public:
  using Work = std::function<absl::Status(const std::atomic<bool>& cancelled, const ReportProgress& report)>;

  // Returns the reactor for gRPC. An error: the call is answered with it, and nothing is done.
  static grpc::ServerWriteReactor<v1::FileProgress>* Start(const absl::Status& status, Work work);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  void Run(const Work& work);
  // Sends, when what was sent before has left.
  absl::Status Report(const v1::FileProgress& progress);
  absl::Status AwaitSent();

  std::atomic<bool> cancelled_{false};
  v1::FileProgress message_;  // being written
  Mutex mu_;
  CondVar sent_;
  bool sending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace shardmesh
