#include "worker/doors/seat_sink.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<std::unique_ptr<ByteSink>> SeatSink::Begin(std::shared_ptr<SeatSession> session,
                                                           const v1::PushHeader& header) {
  const JobSpec& job = session->shard().spec();
  const Plan& plan = session->shard().plan();
  if (header.job() != job.name) {
    return absl::InvalidArgumentError(absl::StrCat("the session is of job ", job.name, ", and the push of another"));
  }
  if (header.shard() >= plan.num_shards()) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard ", header.shard(), " is none of job ", job.name, "'s: 0 to ", plan.num_shards() - 1));
  }
  if (header.has_bucket()) {
    return absl::FailedPreconditionError(absl::StrCat("a bucket's gradient shard: slots of job ", job.name,
                                                      " are pulled; push the gradient shards of all buckets"));
  }
  const int64_t expected = plan.GradientShardBytes(header.shard());
  if (header.total_bytes() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("a gradient shard of ", header.total_bytes(), " bytes; shard ",
                                                   header.shard(), " of job ", job.name, " has ", expected));
  }
  ASSIGN_OR_RETURN(const SeatSession::Push push, session->BeginPush(header));
  return std::unique_ptr<ByteSink>(new SeatSink(std::move(session), header, push));
}

SeatSink::~SeatSink() {
  if (push_.window != nullptr) session_->EndPush(push_, header_.shard(), complete_);
}

absl::Status SeatSink::Append(absl::string_view bytes) {
  received_ += static_cast<int64_t>(bytes.size());
  if (received_ > header_.total_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("more than the ", header_.total_bytes(), " bytes that the header announced"));
  }
  if (push_.window == nullptr) return absl::OkStatus();
  const Plan& plan = session_->shard().plan();
  const int64_t width = BytesPerElement(plan.gradient_format());
  while (!bytes.empty()) {
    const Bucket& bucket = plan.buckets()[bucket_];
    const int64_t shard_bytes = bucket.gradients(header_.shard()) * width;
    const int64_t take = std::min<int64_t>(static_cast<int64_t>(bytes.size()), shard_bytes - in_bucket_);
    char* const to = push_.window + bucket.gradient_offset + bucket.begin(header_.shard()) * width + in_bucket_;
    RETURN_IF_ERROR(session_->Write(push_, to, bytes.substr(0, take)));
    bytes.remove_prefix(take);
    in_bucket_ += take;
    if (in_bucket_ != shard_bytes) continue;
    ++bucket_;
    in_bucket_ = 0;
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::PushReply> SeatSink::Finish() {
  if (received_ != header_.total_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("the stream ended after ", received_, " of the ",
                                                   header_.total_bytes(), " bytes that its header announced"));
  }
  complete_ = true;
  v1::PushReply reply;
  reply.set_applied(push_.applied);
  return reply;
}

}  // namespace shardmesh
