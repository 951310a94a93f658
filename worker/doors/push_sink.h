// PushSink: receives the bytes of one push (shard.proto) and puts them where they belong: a gradient shard straight
// into its slot's window, checked for finiteness while it is in cache; initial weights into a buffer. For one thread.
// Nothing is declared unless Finish returns OK; the destructor lets another push of the same bytes begin.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/doors/byte_sink.h"
#include "worker/job/job_shard.h"

namespace shardmesh {

class PushSink final : public ByteSink {
 public:
  // Errors: see Shard.Push. A push that is not needed any more (step committed, or its bytes lie there) is accepted,
  // and its bytes are dropped.
  static absl::StatusOr<std::unique_ptr<PushSink>> Begin(std::shared_ptr<JobShard> shard, const v1::PushHeader& header);
  ~PushSink() override;
  PushSink(const PushSink&) = delete;
  PushSink& operator=(const PushSink&) = delete;

  absl::Status CheckWanted() const override;
  absl::Status Append(absl::string_view bytes) override;
  absl::StatusOr<v1::PushReply> Finish() override;

 private:
  PushSink(std::shared_ptr<JobShard> shard, const v1::PushHeader& header);
  bool initial() const { return header_.content() == v1::PushHeader::CONTENT_INITIAL_WEIGHTS; }
  absl::Status Prepare();
  absl::Status PrepareGradient();
  absl::Status LookAtStep();
  absl::Status CheckFinite(int bucket, int64_t begin_bytes, int64_t end_bytes);
  absl::Status CheckInitial() const;  // InvalidArgument: initial weights that are stepped are not finite; names them
  absl::Status FoundNonFinite(int bucket, int64_t element);
  // Where the bucket's gradient shard is received: in the slot's window, or, where that lies in memory of a device, in
  // memory of the host, from which ToDevice takes it there when it is whole.
  char* GradientAt(int bucket);
  char* InWindow(char* window, int bucket) const;
  absl::Status ToDevice(int bucket);
  // Of bucket residency.
  absl::Status CheckBucket() const;
  bool HasBucket(int bucket) const;
  absl::Status BucketReady();
  bool bucketed() const { return shard_->plan().bucketed(); }

  const std::shared_ptr<JobShard> shard_;
  const v1::PushHeader header_;
  bool owns_push_ = false;
  bool drop_ = false;     // the bytes are not needed
  bool applied_ = false;  // because the step is committed
  int64_t received_ = 0;
  int bucket_ = 0;            // of a gradient: where the next byte goes
  int64_t in_bucket_ = 0;     // bytes of this bucket's shard received
  int64_t checked_ = 0;       // of those: checked for finiteness
  bool drop_bucket_ = false;  // its bytes are not needed
  int bad_tensor_ = -1;       // the first tensor with a gradient that is not finite, under policy skip
  InitialShard initial_;
  std::vector<char> staged_;  // of a device's bucket
};

}  // namespace shardmesh
