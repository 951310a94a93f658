// The connected session: gradients and weights are this process's own memory; a step pushes every slot's gradient
// shards to their owners, declares the slots, and pulls the new weights.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/next_incarnation.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/job/absent_weights.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kAway = absl::Milliseconds(5);

class ConnectedSession final : public Session {
 public:
  ConnectedSession(std::shared_ptr<Job> job, std::vector<Slot> slots) : Session(std::move(job), std::move(slots)) {}

  // This process's own windows.
  absl::Status Open() {
    const auto create = [](const char* name, int64_t bytes) {
      return Segment::Create(name, std::max(bytes, kSegmentPage), 0);
    };
    ASSIGN_OR_RETURN(parameters_, create("shardmesh-weights", job_->plan().window_bytes()));
    if (job_->options().writable_weights) RETURN_IF_ERROR(ShowPrivately());
    for (size_t s = 0; s < slots_.size(); ++s) {
      ASSIGN_OR_RETURN(Segment window, create("shardmesh-gradients", job_->plan().gradient_window_bytes()));
      gradients_.push_back(std::move(window));
    }
    if (bucketed() && !guarded()) absent_.emplace(job_->plan());
    for (size_t b = 0; absent_.has_value() && b < job_->plan().buckets().size(); ++b) {
      absent_->Show(static_cast<int>(b), parameters_.data());
    }
    return OpenBuckets();
  }

  absl::Status AwaitWeights(absl::Duration timeout) override {
    const absl::Time deadline = MonotonicNow() + timeout;
    ASSIGN_OR_RETURN(const shardmesh::Step committed, AwaitCommittedStep(*job_, home(), timeout));
    return PullWeights(committed, deadline);
  }

  absl::StatusOr<v1::StepReply> Step(const StepOptions& options) override {
    RETURN_IF_ERROR(CheckHasWeights());
    const absl::Time deadline = MonotonicNow() + options.timeout;
    const v1::StepRequest request = NewStepRequest(options);
    // A lost connection or a push that overlaps an old one: everything here can be repeated, where that can help.
    absl::StatusOr<v1::StepReply> reply = TryStep(request, deadline);
    if (!absl::IsUnavailable(reply.status()) && !absl::IsAborted(reply.status())) return reply;
    do {
      if (AnyComesBack()) Pause(kAway);
      RETURN_IF_ERROR(CheckMembers());
      reply = TryStep(request, deadline);
    } while (absl::IsUnavailable(reply.status()) && AnyComesBack() && MonotonicNow() < deadline);
    return reply;
  }

 private:
  Rank home() const { return Rank(slots_[0].value() % job_->plan().num_ranks()); }

  // Unavailable: a worker that does not answer soon, or what the workers say is wrong with the job. Soon is short
  // enough that the error still comes within twice a heartbeat time-out when a broken connection was what called for
  // this.
  absl::Status CheckMembers() const {
    for (int rank = 0; rank < job_->plan().num_ranks(); ++rank) {
      const auto ask = [&]() -> absl::StatusOr<v1::GetStatusReply> {
        absl::StatusOr<v1::GetStatusReply> reply = job_->worker(Rank(rank)).GetStatus(job_->peer_timeout() / 6);
        if (!absl::IsDeadlineExceeded(reply.status())) return reply;
        return absl::UnavailableError(reply.status().message());  // it may be starting
      };
      const absl::StatusOr<v1::GetStatusReply> status = CallAgain(*job_, Rank(rank), job_->peer_timeout(), ask);
      if (!status.ok()) return absl::UnavailableError(absl::StrCat("no answer: ", status.status().message()));
      for (const v1::GetStatusReply::Job& job : status->jobs()) {
        if (job.name() == job_->spec().name && !job.error().empty()) return absl::UnavailableError(job.error());
      }
    }
    return absl::OkStatus();
  }

  bool AnyComesBack() const {
    for (int rank = 0; rank < job_->plan().num_ranks(); ++rank) {
      if (job_->MayComeBack(Rank(rank))) return true;
    }
    return false;
  }

  // What fails because a worker is away that comes back is repeated until it is there.
  template <typename Call>
  absl::Status Again(absl::Time deadline, const Call& call) {
    absl::Status status = call();
    while (absl::IsUnavailable(status) && AnyComesBack() && MonotonicNow() < deadline) {
      Pause(kAway);
      RETURN_IF_ERROR(CheckMembers());
      status = call();
    }
    return status;
  }

  absl::StatusOr<v1::StepReply> TryStep(const v1::StepRequest& request, absl::Time deadline) {
    for (size_t s = 0; s < slots_.size() && !bucketed(); ++s) {
      RETURN_IF_ERROR(PushSlot(s, request.step(), std::nullopt, deadline));
    }
    RETURN_IF_ERROR(DeclareRest(deadline));
    ASSIGN_OR_RETURN(v1::StepReply reply, job_->worker(home()).Step(request, deadline - MonotonicNow()));
    RETURN_IF_ERROR(PullWeights(shardmesh::Step(request.step()), deadline));
    RETURN_IF_ERROR(BeginNextStep(committed_));
    return reply;
  }

  absl::Status StartFetch(int) override { return absl::OkStatus(); }
  absl::Status Fetch(int bucket, bool, absl::Duration timeout) override {
    int used = 0;
    for (int b = 0; b < static_cast<int>(job_->plan().buckets().size()); ++b) used += InUse(b);
    if (used > job_->plan().slots().prefetch_buckets) {
      return absl::ResourceExhaustedError(absl::StrCat("bucket ", bucket, " would be one more than the ", used,
                                                       " that a trainer of job ", job_->spec().name,
                                                       " may use; release one first"));
    }
    const absl::Time deadline = MonotonicNow() + timeout;
    return Again(deadline, [&] { return PullBucket(bucket, deadline); });
  }
  absl::Status Drop(int bucket) override {
    const Plan& plan = job_->plan();
    RETURN_IF_ERROR(parameters_.Punch(plan.buckets()[bucket].weight_offset, plan.WeightPageBytes(bucket)));
    if (absent_.has_value()) absent_->Show(bucket, parameters_.data());
    return absl::OkStatus();
  }

  // A gradient shard that a worker has got is not taken again, whatever the window holds by then.
  absl::Status SendBucket(v1::DeclareBucketRequest& request, bool declared, absl::Duration timeout) override {
    const absl::Time deadline = MonotonicNow() + timeout;
    return Again(deadline, [&] { return TrySendBucket(request, declared, deadline); });
  }

  absl::Status TrySendBucket(const v1::DeclareBucketRequest& request, bool declared, absl::Time deadline) {
    const int bucket = request.bucket();
    for (size_t s = 0; s < slots_.size() && !declared; ++s) {
      const absl::Status pushed = PushSlot(s, request.step(), bucket, deadline);
      if (absl::IsDeadlineExceeded(pushed)) {  // which is for buckets that are declared
        return absl::UnavailableError(absl::StrCat("bucket ", bucket, " is not declared yet: ", pushed.message()));
      }
      RETURN_IF_ERROR(pushed);
      RETURN_IF_ERROR(
          gradients_[s].Punch(job_->plan().buckets()[bucket].gradient_offset, job_->plan().GradientPageBytes(bucket)));
    }
    return job_->worker(home()).DeclareBucket(request, deadline - MonotonicNow()).status();
  }

  // Each shard's gradient goes to one of its replicas: on one host they share the slot's window.
  // `only`: of this bucket alone.
  absl::Status PushSlot(size_t index, int64_t step, std::optional<int> only, absl::Time deadline) {
    const Plan& plan = job_->plan();
    v1::PushHeader header;
    header.set_job(job_->spec().name);
    header.set_epoch(job_->epoch().value());
    header.set_content(v1::PushHeader::CONTENT_GRADIENT);
    header.set_slot(slots_[index].value());
    header.set_step(step);
    if (only.has_value()) header.set_bucket(*only);
    for (int shard = 0; shard < plan.num_shards(); ++shard) {
      header.set_shard(shard);
      std::vector<absl::string_view> parts;
      const int64_t width = BytesPerElement(plan.gradient_format());
      const int end = only.has_value() ? *only + 1 : static_cast<int>(plan.buckets().size());
      for (int b = only.value_or(0); b < end; ++b) {
        const Bucket& bucket = plan.buckets()[b];
        parts.emplace_back(gradients_[index].data() + bucket.gradient_offset + bucket.begin(shard) * width,
                           bucket.gradients(shard) * width);
      }
      const Rank owner = plan.RankOf({shard, slots_[index].value() % plan.num_replicas()});
      RETURN_IF_ERROR(job_->worker(owner).Push(header, parts, deadline - MonotonicNow()));
    }
    return absl::OkStatus();
  }

  // With bucket residency: what is in use.
  absl::Status PullWeights(shardmesh::Step committed, absl::Time deadline) {
    if (!bucketed()) return PullBucket(std::nullopt, deadline);
    for (int b = 0; b < static_cast<int>(job_->plan().buckets().size()); ++b) {
      if (InUse(b)) RETURN_IF_ERROR(PullBucket(b, deadline));
    }
    committed_ = committed;
    return absl::OkStatus();
  }

  // One, or all of them. They are whole until the last slot is declared: any slot of this session that is not will do.
  // One that a trainer before this one declared will not.
  absl::Status PullBucket(std::optional<int> only, absl::Time deadline) {
    absl::Status status;
    for (Slot slot : slots_) {
      status = PullFor(slot, only, deadline);
      if (!absl::IsAborted(status)) break;
    }
    return status;
  }

  absl::Status PullFor(Slot slot, std::optional<int> only, absl::Time deadline) {
    const Plan& plan = job_->plan();
    v1::PullRequest request;
    request.set_job(job_->spec().name);
    request.set_epoch(job_->epoch().value());
    request.set_for_slot(slot.value());
    if (only.has_value()) request.set_bucket(*only);
    int bucket = only.value_or(0);
    const int64_t expected = only.has_value() ? plan.buckets()[bucket].weight_bytes : plan.version_bytes();
    int64_t in_bucket = 0;
    const auto begin = [&](const v1::PullHeader& header) -> absl::Status {
      if (header.plan_hash() != plan.hash()) {  // it went on with other workers while this was asked
        return absl::AbortedError(absl::StrCat("the weights have plan ", header.plan_hash(), ", not ", plan.hash(),
                                               ": job ", job_->spec().name,
                                               " is at a later epoch; open the job again"));
      }
      if (header.total_bytes() == expected) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("the weights have ", header.total_bytes(), " bytes; ", expected, " expected"));
    };
    if (only.has_value()) RETURN_IF_ERROR(GuardWeights(*only, /*accessible=*/true));
    const auto data = [&](absl::string_view bytes) {
      while (!bytes.empty()) {
        const Bucket& b = plan.buckets()[bucket];
        const int64_t size = b.weight_bytes;
        const int64_t take = std::min<int64_t>(bytes.size(), size - in_bucket);
        std::memcpy(parameters_.data() + b.weight_offset + in_bucket, bytes.data(), take);
        bytes.remove_prefix(take);
        in_bucket += take;
        if (in_bucket == size) {
          ++bucket;
          in_bucket = 0;
        }
      }
      return absl::OkStatus();
    };
    ASSIGN_OR_RETURN(const v1::PullHeader header,
                     job_->worker(home()).Pull(request, begin, data, deadline - MonotonicNow()));
    if (!only.has_value()) committed_ = shardmesh::Step(header.step());
    return absl::OkStatus();
  }

  std::optional<AbsentWeights> absent_;  // none: weights are always there, or guarded where they are not
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> ConnectSession(std::shared_ptr<Job> job, std::vector<Slot> slots) {
  if (job->spec().pulled()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job->spec().name, " has pulled slots: connect to none (Job::ConnectPulling)"));
  }
  RETURN_IF_ERROR(CheckSlots(*job, slots));
  auto session = std::make_unique<ConnectedSession>(std::move(job), std::move(slots));
  RETURN_IF_ERROR(Annotate(session->Open(), "connecting"));
  return session;
}

}  // namespace shardmesh
