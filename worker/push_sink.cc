#include "worker/push_sink.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/finite.h"
#include "core/status.h"

namespace shardmesh {
namespace {

absl::Status UnderWay() {
  return absl::AbortedError("another push of this piece is under way; repeat when it has ended");
}

}  // namespace

PushSink::PushSink(std::shared_ptr<JobShard> shard, const v1::PushHeader& header)
    : shard_(std::move(shard)), header_(header) {}

PushSink::~PushSink() {
  if (owns_push_) shard_->EndPush(initial() ? -1 : header_.slot());
}

absl::StatusOr<std::unique_ptr<PushSink>> PushSink::Begin(std::shared_ptr<JobShard> shard,
                                                          const v1::PushHeader& header) {
  std::unique_ptr<PushSink> sink(new PushSink(std::move(shard), header));
  RETURN_IF_ERROR(sink->Prepare());
  return sink;
}

absl::Status PushSink::Prepare() {
  RETURN_IF_ERROR(shard_->CheckEpoch(header_.epoch()));
  if (header_.shard() != shard_->place().shard) {
    return absl::InvalidArgumentError(absl::StrCat("a piece of shard ", header_.shard(), " sent to rank ",
                                                   shard_->rank().value(), ", which holds shard ",
                                                   shard_->place().shard));
  }
  const int64_t expected = initial() ? shard_->plan().InitialPieceBytes() : shard_->plan().GradientPieceBytes();
  if (header_.total_bytes() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("a piece of ", header_.total_bytes(), " bytes; shard ",
                                                   header_.shard(), " of job ", shard_->spec().name, " has ",
                                                   expected));
  }
  if (initial()) {
    applied_ = drop_ = shard_->protocol().committed_step().value() != kNoStep;
    RETURN_IF_ERROR(shard_->protocol().Health());
    if (drop_) return absl::OkStatus();
    initial_.resize(expected / sizeof(float));
    owns_push_ = shard_->BeginPush(-1);
    return owns_push_ ? absl::OkStatus() : UnderWay();
  }
  return PrepareGradient();
}

absl::Status PushSink::LookAtStep() {
  ASSIGN_OR_RETURN(const auto outcome, shard_->protocol().CheckStep(Slot(header_.slot()), Step(header_.step())));
  applied_ = outcome.has_value();
  drop_ = applied_ || shard_->protocol().HasPiece(Slot(header_.slot()), header_.shard(), Step(header_.step()));
  return absl::OkStatus();
}

absl::Status PushSink::PrepareGradient() {
  RETURN_IF_ERROR(LookAtStep());
  // The replicas of a shard share the slot's window: one of them writes it, so that two pushes never meet there.
  const int writer = header_.slot() % shard_->plan().num_replicas();
  if (shard_->place().replica != writer) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", header_.slot(), "'s piece of shard ", header_.shard(),
                                                   " sent to rank ", shard_->rank().value(), "; push it to rank ",
                                                   shard_->plan().RankOf({header_.shard(), writer}).value()));
  }
  if (drop_) return absl::OkStatus();
  owns_push_ = shard_->BeginPush(header_.slot());
  if (!owns_push_) return UnderWay();
  RETURN_IF_ERROR(LookAtStep());  // again: until it was claimed, another push may have brought the piece
  if (drop_) {
    shard_->EndPush(header_.slot());
    owns_push_ = false;
    return absl::OkStatus();
  }
  const uint64_t holder = shard_->protocol().HolderOf(Slot(header_.slot()));
  if (holder == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("slot ", header_.slot(), " is written by session ",
                                                    holder & 0xffffffff, " attached to rank ", (holder >> 32) - 1,
                                                    "; push to a slot that no trainer is attached to"));
}

char* PushSink::GradientAt(int bucket) const {
  const Bucket& b = shard_->plan().buckets()[bucket];
  return shard_->host().slot(header_.slot()).data() + b.gradient_offset +
         header_.shard() * b.shard_gradients() * BytesPerElement(shard_->plan().gradient_format());
}

absl::Status PushSink::Append(absl::string_view bytes) {
  if (received_ + static_cast<int64_t>(bytes.size()) > header_.total_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("more than the ", header_.total_bytes(), " bytes that the header announced"));
  }
  if (drop_) {
    received_ += bytes.size();
    return absl::OkStatus();
  }
  if (initial()) {
    std::memcpy(reinterpret_cast<char*>(initial_.data()) + received_, bytes.data(), bytes.size());
    received_ += bytes.size();
    return absl::OkStatus();
  }
  const int64_t element_bytes = BytesPerElement(shard_->plan().gradient_format());
  received_ += bytes.size();
  while (!bytes.empty()) {
    const int64_t shard_bytes = shard_->plan().buckets()[bucket_].shard_gradients() * element_bytes;
    const int64_t take = std::min<int64_t>(bytes.size(), shard_bytes - in_bucket_);
    std::memcpy(GradientAt(bucket_) + in_bucket_, bytes.data(), take);
    in_bucket_ += take;
    bytes.remove_prefix(take);
    const int64_t whole = in_bucket_ / element_bytes * element_bytes;
    RETURN_IF_ERROR(CheckFinite(bucket_, checked_, whole));
    checked_ = whole;
    if (in_bucket_ == shard_bytes) {
      ++bucket_;
      in_bucket_ = checked_ = 0;
    }
  }
  return absl::OkStatus();
}

// Offenders in padding do not count, since nobody reads it; what follows them does.
absl::Status PushSink::CheckFinite(int bucket, int64_t begin_bytes, int64_t end_bytes) {
  const Plan& plan = shard_->plan();
  const int64_t element_bytes = BytesPerElement(plan.gradient_format());
  const int64_t end = end_bytes / element_bytes;
  for (int64_t at = begin_bytes / element_bytes; bad_tensor_ < 0; ++at) {
    int64_t offender = 0;
    if (AllFiniteBelow(GradientAt(bucket) + at * element_bytes, plan.gradient_format(), end - at,
                       shard_->spec().num_slots, &offender)) {
      return absl::OkStatus();
    }
    at += offender;
    RETURN_IF_ERROR(FoundNonFinite(bucket, header_.shard() * plan.buckets()[bucket].shard_elements + at));
  }
  return absl::OkStatus();
}

// `element` counts from the bucket's start.
absl::Status PushSink::FoundNonFinite(int bucket, int64_t element) {
  const Plan& plan = shard_->plan();
  const int64_t block = element / kBlockElements * kBlockElements;
  const std::vector<Run> runs = plan.RunsIn(bucket, block, block + kBlockElements);
  if (runs.empty() || element - block >= runs[0].num_elements) return absl::OkStatus();
  const int64_t in_tensor = runs[0].first_element + element - block;
  if (shard_->spec().non_finite == NonFinitePolicy::kSkip) {
    bad_tensor_ = runs[0].tensor;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("slot ", header_.slot(), " of step ", header_.step(),
                                                 ": the gradient of \"", shard_->spec().parameters[runs[0].tensor].name,
                                                 "\" at element ", in_tensor, " is not finite, or not below FLT_MAX / ",
                                                 shard_->spec().num_slots, "; push it again with finite values"));
}

absl::StatusOr<v1::PushReply> PushSink::Finish() {
  if (received_ != header_.total_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("the stream ended after ", received_, " of the ",
                                                   header_.total_bytes(), " bytes that its header announced"));
  }
  v1::PushReply reply;
  reply.set_applied(applied_);
  if (drop_) return reply;
  if (initial()) {
    for (size_t i = 0; i < initial_.size(); ++i) {
      if (FloatBits(initial_[i]) << 1 >= 0xFF000000u) {
        return absl::InvalidArgumentError(absl::StrCat("element ", i, " of the initial weights' piece is not finite"));
      }
    }
    RETURN_IF_ERROR(shard_->engine().StageInitial(std::move(initial_), header_.push_id()));
    return reply;
  }
  if (bad_tensor_ >= 0) shard_->protocol().NoteNonFinite(Slot(header_.slot()), bad_tensor_, Step(header_.step()));
  RETURN_IF_ERROR(shard_->protocol().PieceReady(Slot(header_.slot()), header_.shard(), Step(header_.step())));
  return reply;
}

}  // namespace shardmesh
