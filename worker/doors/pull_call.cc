#include "worker/doors/pull_call.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/plain_text.h"
#include "core/base/status.h"
#include "proto/bulk.h"
#include "rpc/base/main_support.h"
#include "rpc/base/status.h"
#include "rpc/calls/caller.h"
#include "worker/doors/on_demand.h"
#include "worker/doors/stalled_call.h"
#include "worker/doors/waiting_call.h"

namespace shardmesh {
namespace {

constexpr int64_t kDefaultChunkBytes = 1 << 20;
constexpr size_t kMaxPuller = 256;

std::string List(const std::vector<Step>& steps) {
  if (steps.empty()) return "none";
  return absl::StrJoin(steps, ", ", [](std::string* out, Step step) { absl::StrAppend(out, step.value()); });
}

}  // namespace

PullCall::PullCall(const v1::PullRequest& request, grpc::CallbackServerContext& context, absl::Time deadline)
    : request_(request), context_(context), deadline_(deadline), puller_(PlainText(CallerOf(context), kMaxPuller)) {}

grpc::ServerWriteReactor<grpc::ByteBuffer>* PullCall::Start(grpc::CallbackServerContext& context,
                                                            absl::StatusOr<std::shared_ptr<JobShard>> shard,
                                                            const v1::PullRequest& request) {
  std::shared_ptr<PullCall> call(new PullCall(request, context, AnswerBy(context)));
  call->self_ = call;
  if (!shard.ok()) {
    MutexLock lock(call->mu_);
    call->Answer(shard.status());
    return call.get();
  }
  call->shard_ = *shard;
  call->Watch();
  call->shard_->waiters().Add(call);
  return call.get();
}

void PullCall::Watch() {
  LookAtCall([weak = std::weak_ptr<PullCall>(self_)] {
    const std::shared_ptr<PullCall> looked_at = weak.lock();
    return looked_at != nullptr && looked_at->LookForStall();
  });
}

// The write then fails, and with it the call.
bool PullCall::LookForStall() {
  MutexLock lock(mu_);
  if (answered_) return false;
  if (const absl::Status open = shard_->CheckOpen(); parked_ && !open.ok()) {
    Answer(open);
    return false;
  }
  if (MonotonicNow() - writing_since_ < kPullSilence) return true;
  spdlog::warn("event=pull_stalled job={} step={} peer={} silence={}", shard_->spec().name, step_.value(),
               Quoted(puller_), absl::FormatDuration(kPullSilence));
  context_.TryCancel();
  return false;
}

bool PullCall::Try() {
  MutexLock lock(mu_);
  if (answered_ || (streaming_ && !by_bucket())) return true;
  if (streaming_) {  // among the waiters until the end: the next bucket may have to be gathered first
    if (parked_) SendNext();
    return answered_;
  }
  absl::StatusOr<bool> chosen = Choose();
  if (chosen.ok() && !*chosen && MonotonicNow() >= deadline_) chosen = Late();
  if (chosen.ok() && !*chosen) return false;
  if (const absl::Status status = chosen.ok() ? ErrorAt(FaultPoint::kPulling) : chosen.status(); !status.ok()) {
    Answer(status);
    return true;
  }
  streaming_ = true;
  v1::PullHeader header;
  header.set_step(step_.value());
  header.set_epoch(shard_->epoch().value());
  header.set_total_bytes(request_.has_bucket() ? shard_->plan().buckets()[request_.bucket()].weight_bytes
                                               : shard_->plan().version_bytes());
  header.set_plan_hash(shard_->plan().hash());
  header_ = header.SerializeAsString();
  bucket_ = request_.bucket();
  SendNext();
  return answered_ || !by_bucket();
}

bool PullCall::Pin(Step step) {
  const std::optional<int> buffer = shard_->protocol().publications().Pin(step);
  if (!buffer.has_value()) return false;
  Read(step, *buffer);
  return true;
}

void PullCall::Read(Step step, int buffer) {
  step_ = step;
  source_ = std::make_shared<Source>();
  source_->shard = shard_;
  source_->number = shard_->pulls().Enter(step, buffer, puller_);
  source_->buffer = buffer;
  source_->base = shard_->host().publication(buffer).data();
  if (const DeviceWindows* const device = shard_->host().device(); device != nullptr) {
    source_->on_device = device->publications[buffer].data();
  }
}

// True: source_ and step_ are set. False: wait.
absl::StatusOr<bool> PullCall::Choose() {
  StepProtocol& protocol = shard_->protocol();
  if (request_.version_case() == v1::PullRequest::kLease) {  // of a job that is gone, too
    ASSIGN_OR_RETURN(const VersionLeases::Lease lease, shard_->leases().PinLeased(request_.lease()));
    Read(lease.step, lease.buffer);
    return true;
  }
  if (absl::IsNotFound(shard_->Health())) return shard_->Health();
  if (request_.epoch() != 0) RETURN_IF_ERROR(shard_->protocol().members().CheckEpoch(request_.epoch()));
  if (request_.version_case() == v1::PullRequest::kForSlot) {
    step_ = protocol.committed_step();
    RETURN_IF_ERROR(CheckSlotStillOpen());
    RETURN_IF_ERROR(CheckBucket());
    if (by_bucket()) return true;
    source_ = std::make_shared<Source>();
    source_->shard = shard_;
    source_->base = shard_->host().window().data();
    const DeviceWindows* const device = shard_->host().device();
    if (device != nullptr) source_->on_device = device->window.data();
    return true;
  }
  const std::vector<Step> published = protocol.publications().Published();
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

absl::Status PullCall::CheckBucket() const {
  if (!request_.has_bucket()) return absl::OkStatus();
  if (!shard_->plan().bucketed()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", shard_->spec().name, " has full residency: pull all buckets for_slot"));
  }
  const auto buckets = static_cast<int64_t>(shard_->plan().buckets().size());
  if (request_.bucket() >= 0 && request_.bucket() < buckets) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("bucket ", request_.bucket(), " is none of job ", shard_->spec().name, "'s: 0 to ", buckets - 1));
}

int PullCall::end_bucket() const {
  return request_.has_bucket() ? request_.bucket() + 1 : static_cast<int>(shard_->plan().buckets().size());
}

// The use of the bucket before goes with its last slice.
absl::StatusOr<bool> PullCall::TakeBucket() {
  StepProtocol& protocol = shard_->protocol();
  if (!parked_) {
    source_ = std::make_shared<Source>();
    source_->shard = shard_;
    source_->base = shard_->host().window().data();
    RETURN_IF_ERROR(protocol.buckets().Acquire(bucket_));
    source_->bucket = bucket_;
  }
  parked_ = !protocol.buckets().Holds(bucket_);
  if (!parked_) return true;
  RETURN_IF_ERROR(shard_->Health());
  if (MonotonicNow() < deadline_) return false;
  return absl::DeadlineExceededError(
      absl::StrCat("bucket ", bucket_, " of job ", shard_->spec().name, " was not gathered in time"));
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
  if (shard_->plan().pulled()) return CheckNotFinished(slot);
  const int64_t declared = shard_->protocol().control()->slots[slot].declared.load();
  if (declared <= step_.value() && shard_->protocol().committed_step() == step_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("slot ", slot, " declared step ", declared, " while version ", step_.value(),
                                         " was read for it; the bytes are not one version, pull again"));
}

// The same of a slot that is pulled: the next step needs it, so as long as nobody has finished it weights stay.
absl::Status PullCall::CheckNotFinished(int slot) const {
  StepProtocol& protocol = shard_->protocol();
  const PulledSlots table(protocol.control(), shard_->spec(), shard_->plan(), step_.value() + 1);
  if (!table.IsFinished(slot) && protocol.committed_step() == step_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("slot ", slot, " of step ", step_.value() + 1, " was finished while version ",
                                         step_.value(),
                                         " was read for it; the bytes may not be one version: take "
                                         "another slot, and pull for that one"));
}

absl::Status PullCall::Late() const {
  return absl::DeadlineExceededError(absl::StrCat(
      "job ", shard_->spec().name,
      " published no version >= ", request_.version_case() == v1::PullRequest::kAtLeast ? request_.at_least() : 0,
      " in time; there: ", List(shard_->protocol().publications().Published()), ", committed step ",
      shard_->protocol().committed_step().value(), OnDemandHint(shard_->spec())));
}

void PullCall::SendNext() {
  const auto& buckets = shard_->plan().buckets();
  const int64_t chunk = request_.chunk_bytes() > 0 ? request_.chunk_bytes() : kDefaultChunkBytes;
  if (bucket_ == end_bucket() && header_.empty()) {
    absl::Status end;
    if (request_.version_case() == v1::PullRequest::kForSlot) end = CheckSlotStillOpen();
    Answer(end);
    return;
  }
  if (by_bucket() && bucket_ < end_bucket() && in_bucket_ == 0) {
    const absl::StatusOr<bool> taken = TakeBucket();
    if (!taken.ok()) return Answer(taken.status());
    if (!*taken) return;
  }
  grpc::Slice data;
  if (bucket_ < end_bucket()) {
    const Bucket& bucket = buckets[bucket_];
    const int64_t bytes = bucket.weight_bytes;
    const int64_t take = std::min(chunk, bytes - in_bucket_);
    char* from = const_cast<char*>(source_->base) + bucket.weight_offset + in_bucket_;
    if (take > 0 && source_->on_device != nullptr) {
      absl::StatusOr<grpc::Slice> copied = FromDevice(bucket.weight_offset + in_bucket_, take);
      if (!copied.ok()) return Answer(copied.status());
      data = *std::move(copied);
    } else if (take > 0) {  // the slice owns a reference to the source, and through it the pin
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
  SetWriting(MonotonicNow());
  StartWrite(&message_);
}

// Memory of a device goes through the host.
absl::StatusOr<grpc::Slice> PullCall::FromDevice(int64_t at, int64_t bytes) const {
  auto copy = std::make_unique<std::string>(static_cast<size_t>(bytes), '\0');
  RETURN_IF_ERROR(shard_->host().device()->Copy(copy->data(), source_->on_device + at, bytes));
  char* const data = copy->data();
  return grpc::Slice(
      data, static_cast<size_t>(bytes), [](void* kept) { delete static_cast<std::string*>(kept); }, copy.release());
}

void PullCall::SetWriting(absl::Time since) {
  writing_since_ = since;
  if (source_ != nullptr && source_->buffer >= 0) shard_->pulls().SetUnread(source_->number, since);
}

void PullCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  message_.Clear();
  SetWriting(absl::InfiniteFuture());
  if (answered_) return;
  if (!ok) {
    Answer(absl::CancelledError("the reader is gone"));
  } else {
    SendNext();
  }
}

// The job's waiters and this call hold each other.
void PullCall::OnDone() {
  if (shard_ != nullptr) shard_->waiters().Remove(this);
  const std::shared_ptr<PullCall> last = std::move(self_);
}

void PullCall::OnCancel() {
  MutexLock lock(mu_);
  if (!answered_ && (!streaming_ || parked_)) Answer(absl::CancelledError("the caller cancelled"));
}

void PullCall::Answer(const absl::Status& status) {
  answered_ = true;
  source_.reset();
  Finish(ToGrpc(status));
}

}  // namespace shardmesh
