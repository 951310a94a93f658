// PullCall: one Pull stream. It waits for its version, pins it, and sends it in slices of the publication's own memory:
// each slice holds the pin, so the bytes stay until gRPC is done with the last one. A reader that takes nothing for
// kPullSilence (stalled_call.h) is cut off: else it would hold its version, and a deleted job's memory, without an end.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/sync.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/job/job_shard.h"
#include "worker/job/waiters.h"

namespace shardmesh {

class PullCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public Waiter {
 public:
  // Returns the reactor for gRPC. `shard` may be an error: the call is answered with it.
  static grpc::ServerWriteReactor<grpc::ByteBuffer>* Start(grpc::CallbackServerContext& context,
                                                           absl::StatusOr<std::shared_ptr<JobShard>> shard,
                                                           const v1::PullRequest& request);

  bool Try() override;  // looks whether the version is there
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // What the slices point into; releases the pin, or the use of the bucket, at the end.
  struct Source {
    std::shared_ptr<JobShard> shard;
    const char* base = nullptr;
    const uint8_t* on_device = nullptr;  // where it is instead, of a job on a device
    int buffer = -1;                     // pinned publication, -1: the parameter window
    int bucket = -1;                     // with bucket residency: the one in use
    uint64_t number = 0;                 // of the pinned publication's pull, in JobShard::pulls
    ~Source() {
      if (bucket >= 0) shard->protocol().buckets().Release(bucket);
      if (buffer < 0) return;
      shard->pulls().Leave(number);
      shard->protocol().publications().Unpin(buffer);
    }
  };

  PullCall(const v1::PullRequest& request, grpc::CallbackServerContext& context, absl::Time deadline);
  void Watch();
  // False: it has ended.
  bool LookForStall();
  absl::StatusOr<bool> Choose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Pin(Step step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Read(Step step, int buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // REQUIRES: it is pinned
  absl::Status CheckSlotStillOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckNotFinished(int slot) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Late() const;
  absl::Status CheckBucket() const;
  absl::StatusOr<grpc::Slice> FromDevice(int64_t at, int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // With bucket residency, of a pull for_slot: the next bucket to send, once the window holds it. False: wait.
  absl::StatusOr<bool> TakeBucket() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool by_bucket() const { return shard_->plan().bucketed() && request_.version_case() == v1::PullRequest::kForSlot; }
  int end_bucket() const;
  void SetWriting(absl::Time since) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answer(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const v1::PullRequest request_;
  grpc::CallbackServerContext& context_;  // as long as the call is not answered
  const absl::Time deadline_;
  const std::string puller_;
  std::shared_ptr<JobShard> shard_;  // set before the call waits
  std::shared_ptr<PullCall> self_;   // gRPC's reference
  Mutex mu_;
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
  bool streaming_ ABSL_GUARDED_BY(mu_) = false;
  bool parked_ ABSL_GUARDED_BY(mu_) = false;  // in the middle of the stream, for a bucket
  std::shared_ptr<Source> source_ ABSL_GUARDED_BY(mu_);
  shardmesh::Step step_ ABSL_GUARDED_BY(mu_);
  int bucket_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t in_bucket_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time writing_since_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // the message; infinite: none
  std::string header_ ABSL_GUARDED_BY(mu_);  // not sent yet
  grpc::ByteBuffer message_;                 // being written
};

}  // namespace shardmesh
