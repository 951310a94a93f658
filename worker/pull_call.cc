#include "worker/pull_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "proto/bulk.h"
#include "rpc/status.h"
#include "worker/waiting_call.h"

namespace shardmesh {
namespace {

constexpr int64_t kDefaultChunkBytes = 1 << 20;

std::string List(const std::vector<Step>& steps) {
  if (steps.empty()) return "none";
  return absl::StrJoin(steps, ", ", [](std::string* out, Step step) { absl::StrAppend(out, step.value()); });
}

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* PullCall::Start(grpc::CallbackServerContext& context,
                                                            absl::StatusOr<std::shared_ptr<JobShard>> shard,
                                                            const v1::PullRequest& request) {
  std::shared_ptr<PullCall> call(new PullCall(request, AnswerBy(context)));
  call->self_ = call;
  if (!shard.ok()) {
    MutexLock lock(call->mu_);
    call->Answer(shard.status());
    return call.get();
  }
  call->shard_ = *shard;
  call->shard_->waiters().Add(call);
  return call.get();
}

bool PullCall::Try() {
  MutexLock lock(mu_);
  if (answered_ || streaming_) return true;
  absl::StatusOr<bool> chosen = Choose();
  if (chosen.ok() && !*chosen && absl::Now() >= deadline_) chosen = Late();
  if (!chosen.ok()) {
    Answer(chosen.status());
    return true;
  }
  if (!*chosen) return false;
  streaming_ = true;
  v1::PullHeader header;
  header.set_step(step_.value());
  header.set_total_bytes(shard_->plan().version_bytes());
  header.set_plan_hash(shard_->plan().hash());
  header_ = header.SerializeAsString();
  SendNext();
  return true;
}

bool PullCall::Pin(Step step) {
  const std::optional<int> buffer = shard_->protocol().Pin(step);
  if (!buffer.has_value()) return false;
  step_ = step;
  source_ = std::make_shared<Source>();
  source_->shard = shard_;
  source_->buffer = *buffer;
  source_->base = shard_->host().publication(*buffer).data();
  return true;
}

// True: source_ and step_ are set. False: wait.
absl::StatusOr<bool> PullCall::Choose() {
  StepProtocol& protocol = shard_->protocol();
  if (absl::IsNotFound(shard_->Health())) return shard_->Health();
  if (request_.version_case() == v1::PullRequest::kForSlot) {
    step_ = protocol.committed_step();
    RETURN_IF_ERROR(CheckSlotStillOpen());
    source_ = std::make_shared<Source>();
    source_->shard = shard_;
    source_->base = shard_->host().window().data();
    return true;
  }
  const std::vector<Step> published = protocol.Published();
  if (request_.version_case() == v1::PullRequest::kExact) {
    if (Pin(Step(request_.exact()))) return true;
    return absl::OutOfRangeError(absl::StrCat("version ", request_.exact(), " of job ", shard_->spec().name,
                                              " is not there; published: ", List(published)));
  }
  const int64_t wanted = request_.version_case() == v1::PullRequest::kAtLeast ? request_.at_least() : 0;
  if (!published.empty() && published.back().value() >= wanted && Pin(published.back())) return true;
  RETURN_IF_ERROR(shard_->Health());  // a version that is there can be read of a failed job, too
  return false;
}

// The window holds the committed step until this slot declares the next one.
absl::Status PullCall::CheckSlotStillOpen() const {
  const int slot = request_.for_slot();
  if (slot < 0 || slot >= shard_->spec().num_slots) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " is none of job ", shard_->spec().name, "'s: 0 to ",
                                                   shard_->spec().num_slots - 1));
  }
  if (step_.value() == kNoStep) {
    return absl::FailedPreconditionError(absl::StrCat("job ", shard_->spec().name, " has no initial weights yet"));
  }
  const int64_t declared = shard_->protocol().page()->slots[slot].declared.load();
  if (declared <= step_.value() && shard_->protocol().committed_step() == step_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("slot ", slot, " declared step ", declared, " while version ", step_.value(),
                                         " was read for it; the bytes are not one version, pull again"));
}

absl::Status PullCall::Late() const {
  return absl::DeadlineExceededError(absl::StrCat(
      "job ", shard_->spec().name,
      " published no version >= ", request_.version_case() == v1::PullRequest::kAtLeast ? request_.at_least() : 0,
      " in time; there: ", List(shard_->protocol().Published()), ", committed step ",
      shard_->protocol().committed_step().value()));
}

void PullCall::SendNext() {
  const auto& buckets = shard_->plan().buckets();
  const int64_t chunk = request_.chunk_bytes() > 0 ? request_.chunk_bytes() : kDefaultChunkBytes;
  if (bucket_ == static_cast<int>(buckets.size()) && header_.empty()) {
    absl::Status end;
    if (request_.version_case() == v1::PullRequest::kForSlot) end = CheckSlotStillOpen();
    Answer(end);
    return;
  }
  grpc::Slice data;
  if (bucket_ < static_cast<int>(buckets.size())) {
    const Bucket& bucket = buckets[bucket_];
    const int64_t bytes = bucket.weight_bytes;
    const int64_t take = std::min(chunk, bytes - in_bucket_);
    char* from = const_cast<char*>(source_->base) + bucket.weight_offset + in_bucket_;
    // The slice owns a reference to the source, and through it the pin.
    if (take > 0) {
      data = grpc::Slice(
          from, take, [](void* kept) { delete static_cast<std::shared_ptr<Source>*>(kept); },
          new std::shared_ptr<Source>(source_));
    }
    in_bucket_ += take;
    if (in_bucket_ == bytes) {
      ++bucket_;
      in_bucket_ = 0;
    }
  }
  message_ = EncodeChunk(std::exchange(header_, {}), data);
  StartWrite(&message_);
}

void PullCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  message_.Clear();
  if (answered_) return;
  if (!ok) {
    Answer(absl::CancelledError("the reader is gone"));
  } else {
    SendNext();
  }
}

void PullCall::OnCancel() {
  MutexLock lock(mu_);
  if (!answered_ && !streaming_) Answer(absl::CancelledError("the caller cancelled"));
}

void PullCall::Answer(const absl::Status& status) {
  answered_ = true;
  source_.reset();
  Finish(ToGrpc(status));
}

}  // namespace shardmesh
