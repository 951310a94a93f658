// The connected session: gradients and weights are this process's own memory; a step pushes every slot's pieces to
// their owners, declares the slots, and pulls the new weights.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/session.h"
#include "core/status.h"

namespace shardmesh {
namespace {

class ConnectedSession final : public Session {
 public:
  ConnectedSession(std::shared_ptr<Job> job, std::vector<Slot> slots) : Session(std::move(job), std::move(slots)) {
    gradients_.assign(slots_.size(), std::vector<char>(job_->plan().gradient_window_bytes(), 0));
    parameters_.assign(job_->plan().window_bytes(), 0);
  }

  absl::Status AwaitWeights(absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    RETURN_IF_ERROR(AwaitCommittedStep(*job_, home(), timeout));
    return PullWeights(deadline);
  }

  absl::StatusOr<v1::StepReply> Step(const StepOptions& options) override {
    RETURN_IF_ERROR(CheckHasWeights());
    const absl::Time deadline = absl::Now() + options.timeout;
    const v1::StepRequest request = NewStepRequest(options);
    // A lost connection or a push that overlaps an old one: everything here can be repeated, where that can help.
    absl::StatusOr<v1::StepReply> reply = TryStep(request, deadline);
    if (!absl::IsUnavailable(reply.status()) && !absl::IsAborted(reply.status())) return reply;
    RETURN_IF_ERROR(CheckMembers());
    return TryStep(request, deadline);
  }

 private:
  char* gradient_window(int slot_index) const override { return const_cast<char*>(gradients_[slot_index].data()); }
  const char* parameter_window() const override { return parameters_.data(); }
  Rank home() const { return Rank(slots_[0].value() % job_->plan().num_ranks()); }

  // Unavailable: a worker that does not answer soon, or what the workers say is wrong with the job. Soon is short
  // enough that the error still comes within twice a heartbeat time-out when a broken connection was what called for
  // this.
  absl::Status CheckMembers() const {
    for (int rank = 0; rank < job_->plan().num_ranks(); ++rank) {
      ShardTransport& worker = job_->worker(Rank(rank));
      const absl::StatusOr<v1::GetStatusReply> status = worker.GetStatus(job_->peer_timeout() / 6);
      if (!status.ok()) return absl::UnavailableError(absl::StrCat("no answer: ", status.status().message()));
      for (const v1::GetStatusReply::Job& job : status->jobs()) {
        if (job.name() == job_->spec().name && !job.error().empty()) return absl::UnavailableError(job.error());
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<v1::StepReply> TryStep(const v1::StepRequest& request, absl::Time deadline) {
    for (size_t s = 0; s < slots_.size(); ++s) RETURN_IF_ERROR(PushSlot(s, request.step(), deadline));
    ASSIGN_OR_RETURN(v1::StepReply reply, job_->worker(home()).Step(request, deadline - absl::Now()));
    RETURN_IF_ERROR(PullWeights(deadline));
    return reply;
  }

  // Each shard's piece goes to one of its replicas: on one host they share the slot's window.
  absl::Status PushSlot(size_t index, int64_t step, absl::Time deadline) {
    const Plan& plan = job_->plan();
    v1::PushHeader header;
    header.set_job(job_->spec().name);
    header.set_epoch(job_->epoch().value());
    header.set_content(v1::PushHeader::CONTENT_GRADIENT);
    header.set_slot(slots_[index].value());
    header.set_step(step);
    for (int shard = 0; shard < plan.num_shards(); ++shard) {
      header.set_shard(shard);
      std::vector<absl::string_view> parts;
      for (const Bucket& bucket : plan.buckets()) {
        const int64_t bytes = bucket.shard_gradients() * BytesPerElement(plan.gradient_format());
        parts.emplace_back(gradients_[index].data() + bucket.gradient_offset + shard * bytes, bytes);
      }
      const Rank owner = plan.RankOf({shard, slots_[index].value() % plan.num_replicas()});
      RETURN_IF_ERROR(job_->worker(owner).Push(header, parts, deadline - absl::Now()));
    }
    return absl::OkStatus();
  }

  // The window is whole until the last slot is declared: any slot of this session that is not will do. One that a
  // trainer before this one declared will not.
  absl::Status PullWeights(absl::Time deadline) {
    absl::Status status;
    for (Slot slot : slots_) {
      status = PullFor(slot, deadline);
      if (!absl::IsAborted(status)) break;
    }
    return status;
  }

  absl::Status PullFor(Slot slot, absl::Time deadline) {
    const Plan& plan = job_->plan();
    v1::PullRequest request;
    request.set_job(job_->spec().name);
    request.set_for_slot(slot.value());
    int bucket = 0;
    int64_t in_bucket = 0;
    const auto begin = [&](const v1::PullHeader& header) -> absl::Status {
      if (header.plan_hash() != plan.hash() || header.total_bytes() != plan.version_bytes()) {
        return absl::FailedPreconditionError(
            absl::StrCat("the weights have plan ", header.plan_hash(), ", not ", plan.hash()));
      }
      return absl::OkStatus();
    };
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
                     job_->worker(home()).Pull(request, begin, data, deadline - absl::Now()));
    committed_ = shardmesh::Step(header.step());
    return absl::OkStatus();
  }

  std::vector<std::vector<char>> gradients_;
  std::vector<char> parameters_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> ConnectSession(std::shared_ptr<Job> job, std::vector<Slot> slots) {
  RETURN_IF_ERROR(CheckSlots(*job, slots));
  return std::unique_ptr<Session>(std::make_unique<ConnectedSession>(std::move(job), std::move(slots)));
}

}  // namespace shardmesh
