#include "worker/doors/push_sink.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "core/format/finite.h"
#include "core/job/stored_values.h"

namespace shardmesh {
namespace {

absl::Status UnderWay(absl::string_view what) {
  return absl::AbortedError(absl::StrCat("another push of ", what, " is under way; repeat when it has ended"));
}

}  // namespace

PushSink::PushSink(std::shared_ptr<JobShard> shard, const v1::PushHeader& header)
    : shard_(std::move(shard)), header_(header) {}

PushSink::~PushSink() {
  if (owns_push_) shard_->pushes().End(initial() ? PushClaims::kInitialWeights : header_.slot());
}

absl::StatusOr<std::unique_ptr<PushSink>> PushSink::Begin(std::shared_ptr<JobShard> shard,
                                                          const v1::PushHeader& header) {
  std::unique_ptr<PushSink> sink(new PushSink(std::move(shard), header));
  RETURN_IF_ERROR(sink->Prepare());
  return sink;
}

absl::Status PushSink::CheckWanted() const { return shard_->CheckOpen(); }

absl::Status PushSink::Prepare() {
  RETURN_IF_ERROR(shard_->protocol().members().CheckEpoch(header_.epoch()));
  if (header_.shard() != shard_->place().shard) {
    return absl::InvalidArgumentError(absl::StrCat("a gradient of shard ", header_.shard(), " sent to rank ",
                                                   shard_->rank().value(), ", which holds shard ",
                                                   shard_->place().shard));
  }
  RETURN_IF_ERROR(CheckBucket());
  const Plan& plan = shard_->plan();
  const int64_t expected = initial()              ? plan.InitialShardBytes(header_.shard())
                           : header_.has_bucket() ? plan.buckets()[header_.bucket()].gradients(header_.shard()) *
                                                        BytesPerElement(plan.gradient_format())
                                                  : plan.GradientShardBytes(header_.shard());
  if (header_.total_bytes() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(initial() ? "initial weights of " : "a gradient shard of ",
                                                   header_.total_bytes(), " bytes; shard ", header_.shard(), " of job ",
                                                   shard_->spec().name, " has ", expected));
  }
  if (initial()) {
    applied_ = drop_ = shard_->protocol().committed_step().value() != kNoStep;
    RETURN_IF_ERROR(shard_->protocol().members().Health());
    if (drop_) return absl::OkStatus();
    initial_.resize(expected / sizeof(float));
    owns_push_ = shard_->pushes().Begin(PushClaims::kInitialWeights);
    return owns_push_ ? absl::OkStatus() : UnderWay("this shard's initial weights");
  }
  return PrepareGradient();
}

absl::Status PushSink::LookAtStep() {
  ASSIGN_OR_RETURN(const auto outcome,
                   shard_->protocol().declarations().CheckStep(Slot(header_.slot()), Step(header_.step())));
  applied_ = outcome.has_value();
  if (applied_ || !bucketed()) {
    drop_ = applied_ || shard_->protocol().declarations().HasGradientShard(Slot(header_.slot()), header_.shard(),
                                                                           Step(header_.step()));
    return absl::OkStatus();
  }
  drop_ = true;
  const int buckets = static_cast<int>(shard_->plan().buckets().size());
  for (int b = header_.bucket(); b < (header_.has_bucket() ? header_.bucket() + 1 : buckets); ++b) {
    drop_ = drop_ && HasBucket(b);
  }
  bucket_ = header_.bucket();
  drop_bucket_ = bucket_ < buckets && HasBucket(bucket_);
  return absl::OkStatus();
}

absl::Status PushSink::CheckBucket() const {
  if (!header_.has_bucket()) return absl::OkStatus();
  if (!bucketed()) {
    return absl::FailedPreconditionError(absl::StrCat("a bucket's gradient shard: job ", shard_->spec().name,
                                                      " has full residency; push the gradient shards of all buckets"));
  }
  const auto buckets = static_cast<int64_t>(shard_->plan().buckets().size());
  if (header_.bucket() >= 0 && header_.bucket() < buckets && !shard_->plan().buckets()[header_.bucket()].frozen) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("bucket ", header_.bucket(), " is none of job ", shard_->spec().name,
                                                 "'s that have gradients: 0 to ", buckets - 1,
                                                 ", without those of frozen parameters"));
}

bool PushSink::HasBucket(int bucket) const {
  return shard_->plan().buckets()[bucket].frozen ||
         shard_->protocol().buckets().HasShard(Slot(header_.slot()), bucket, header_.shard(), Step(header_.step()));
}

// The bucket's gradient shard is whole: with bucket residency it counts from now on. On to the next.
absl::Status PushSink::BucketReady() {
  if (bucketed() && !drop_bucket_) {
    StepProtocol& protocol = shard_->protocol();
    if (bad_tensor_ >= 0)
      protocol.declarations().NoteNonFinite(Slot(header_.slot()), bad_tensor_, Step(header_.step()));
    RETURN_IF_ERROR(ErrorAt(FaultPoint::kGradientShardReceived));
    RETURN_IF_ERROR(
        protocol.buckets().ShardReady(Slot(header_.slot()), bucket_, header_.shard(), Step(header_.step())));
  }
  ++bucket_;
  in_bucket_ = checked_ = 0;
  drop_bucket_ = bucketed() && bucket_ < static_cast<int>(shard_->plan().buckets().size()) && HasBucket(bucket_);
  return absl::OkStatus();
}

absl::Status PushSink::PrepareGradient() {
  shard_->requests().AwaitCommitBefore(Step(header_.step()));
  RETURN_IF_ERROR(LookAtStep());
  // The replicas of a shard share the slot's window: one of them writes it, so that two pushes never meet there.
  const int writer = header_.slot() % shard_->plan().num_replicas();
  if (shard_->place().replica != writer) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", header_.slot(), "'s gradient of shard ", header_.shard(),
                                                   " sent to rank ", shard_->rank().value(), "; push it to rank ",
                                                   shard_->plan().RankOf({header_.shard(), writer}).value()));
  }
  if (drop_) return absl::OkStatus();
  shard_->protocol().slots().AwaitFree({Slot(header_.slot())}, StepSlots::kHolderLag);
  owns_push_ = shard_->pushes().Begin(header_.slot());
  if (!owns_push_) return UnderWay("this gradient shard");
  const uint64_t holder =
      shard_->protocol().slots().HolderOf(Slot(header_.slot()));  // before what it may have left behind
  RETURN_IF_ERROR(LookAtStep());  // again: until it was claimed, somebody else may have brought the gradient shard
  if (drop_) {
    shard_->pushes().End(header_.slot());
    owns_push_ = false;
    return absl::OkStatus();
  }
  if (holder == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("slot ", header_.slot(), " is written by session ",
                                                    SessionOf(holder), " attached to rank ", AttachedTo(holder),
                                                    "; push to a slot that no trainer is attached to"));
}

char* PushSink::InWindow(char* window, int bucket) const {
  const Bucket& b = shard_->plan().buckets()[bucket];
  return window + b.gradient_offset + b.begin(header_.shard()) * BytesPerElement(shard_->plan().gradient_format());
}

char* PushSink::GradientAt(int bucket) {
  if (shard_->host().device() == nullptr) return InWindow(shard_->host().slot(header_.slot()).data(), bucket);
  const int64_t bytes =
      shard_->plan().buckets()[bucket].gradients(header_.shard()) * BytesPerElement(shard_->plan().gradient_format());
  if (static_cast<int64_t>(staged_.size()) < bytes) staged_.resize(static_cast<size_t>(bytes));
  return staged_.data();
}

absl::Status PushSink::ToDevice(int bucket) {
  const DeviceWindows* const device = shard_->host().device();
  if (device == nullptr) return absl::OkStatus();
  return device->Copy(
      InWindow(reinterpret_cast<char*>(device->slots[header_.slot()].data()), bucket), staged_.data(),
      shard_->plan().buckets()[bucket].gradients(header_.shard()) * BytesPerElement(shard_->plan().gradient_format()));
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
    const int64_t shard_bytes = shard_->plan().buckets()[bucket_].gradients(header_.shard()) * element_bytes;
    const int64_t take = std::min<int64_t>(bytes.size(), shard_bytes - in_bucket_);
    if (!drop_bucket_) std::memcpy(GradientAt(bucket_) + in_bucket_, bytes.data(), take);
    in_bucket_ += take;
    bytes.remove_prefix(take);
    const int64_t whole = in_bucket_ / element_bytes * element_bytes;
    if (!drop_bucket_) RETURN_IF_ERROR(CheckFinite(bucket_, checked_, whole));
    checked_ = whole;
    if (in_bucket_ != shard_bytes) continue;
    if (!drop_bucket_) RETURN_IF_ERROR(ToDevice(bucket_));
    RETURN_IF_ERROR(BucketReady());
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
    RETURN_IF_ERROR(FoundNonFinite(bucket, plan.buckets()[bucket].begin(header_.shard()) + at));
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

// Nothing is computed from frozen weights, so that they may be masks of -inf, but for the scales of nf4. Padding counts
// as a weight.
absl::Status PushSink::CheckInitial() const {
  const float* at = initial_.data();
  for (size_t b = 0; b < shard_->plan().buckets().size(); ++b) {
    const Bucket& bucket = shard_->plan().buckets()[b];
    const int64_t size = bucket.size(header_.shard());
    const uint32_t largest = FloatBits(LargestStorable(bucket.weights));
    const char* const instead = bucket.frozen ? "store it as fp32 or bf16" : "make the parameter frozen";
    for (int64_t i = 0; i < size && MustBeFinite(bucket.weights, bucket.frozen); ++i) {
      if ((FloatBits(at[i]) & 0x7FFFFFFFu) <= largest) continue;
      const int64_t element = bucket.begin(header_.shard()) + i, block = element / kBlockElements * kBlockElements;
      const std::vector<Run> runs = shard_->plan().RunsIn(static_cast<int>(b), block, block + kBlockElements);
      if (runs.empty()) return absl::InvalidArgumentError("the padding of the initial weights is not finite; send 0");
      return absl::InvalidArgumentError(absl::StrCat(
          "the initial weights of \"", shard_->spec().parameters[runs[0].tensor].name, "\" at element ",
          runs[0].first_element + element - block, " are not finite",
          std::isfinite(at[i]) ? absl::StrCat(" where they are stored, as ", WeightFormatName(bucket.weights)) : "",
          ": ", at[i], "; give finite values, or ", instead, ", which may have any"));
    }
    at += size;
  }
  return absl::OkStatus();
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
    RETURN_IF_ERROR(CheckInitial());
    RETURN_IF_ERROR(shard_->run().engine.StageInitial(std::move(initial_), header_.push_id()));
    return reply;
  }
  if (bucketed()) {
    // Those of which this shard has no elements.
    const int end = header_.has_bucket() ? header_.bucket() + 1 : static_cast<int>(shard_->plan().buckets().size());
    while (bucket_ < end) RETURN_IF_ERROR(BucketReady());
    return reply;
  }
  if (bad_tensor_ >= 0)
    shard_->protocol().declarations().NoteNonFinite(Slot(header_.slot()), bad_tensor_, Step(header_.step()));
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kGradientShardReceived));
  RETURN_IF_ERROR(shard_->protocol().declarations().GradientShardReady(Slot(header_.slot()), header_.shard(),
                                                                       Step(header_.step())));
  return reply;
}

}  // namespace shardmesh
