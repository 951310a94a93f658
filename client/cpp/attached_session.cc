// The attached session: windows are the workers' memory, a step is a message in its slot's mailbox, what concerns
// buckets a message over a UNIX socket.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/attached_channel.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/gradient_check.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/segment.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {
namespace {

class AttachedSession final : public Session {
 public:
  AttachedSession(std::shared_ptr<Job> job, std::vector<Slot> slots, Rank rank)
      : Session(std::move(job), std::move(slots)), rank_(rank) {}

  // The grant, the socket, the windows.
  absl::Status Open(AttachOptions options) {
    ASSIGN_OR_RETURN(channel_, AttachedChannel::Open(job_, rank_, slots_, options));
    return MapWindows(channel_->welcome(), channel_->TakeDescriptors());
  }

  absl::Status AwaitWeights(absl::Duration timeout) override {
    ASSIGN_OR_RETURN(committed_, AwaitCommittedStep(*job_, rank_, timeout));
    return absl::OkStatus();
  }

  std::vector<v1::AwaitedTrainer> awaited() const override { return channel_->awaited(); }
  // Before the worker hears of it: then the slots are somebody else's.
  void Leave() override {
    LetGo().IgnoreError();
    channel_->Leave();
  }

  absl::StatusOr<v1::StepReply> Step(const StepOptions& options) override {
    RETURN_IF_ERROR(CheckHasWeights());
    const absl::Time deadline = MonotonicNow() + options.timeout;
    RETURN_IF_ERROR(DeclareRest(deadline));
    v1::TrainerRequest request;
    v1::StepRequest& step = *request.mutable_step();
    step = NewStepRequest(options);
    if (!bucketed()) RETURN_IF_ERROR(CheckGradients(tensors_[0], step.step(), *step.mutable_non_finite()));
    absl::StatusOr<v1::TrainerReply> reply =
        channel_->Send(request, deadline, options.timeout, absl::StrCat("step ", step.step(), " was not committed"));
    RETURN_IF_ERROR(Called(reply.status()));
    RETURN_IF_ERROR(BeginNextStep(shardmesh::Step(step.step())));
    return reply->step();
  }

 private:
  // The session is over, and what is written to the windows from here on is this process's own: the slots may have
  // another trainer; or the step is decided, and workers that go on without one of theirs read these gradients until it
  // is done.
  absl::Status LetGo() {
    for (Segment& segment : gradients_) RETURN_IF_ERROR(segment.MakePrivate());
    return absl::OkStatus();
  }

  absl::Status Called(const absl::Status& status) {
    if (absl::IsUnavailable(status) || absl::IsNotFound(status)) RETURN_IF_ERROR(LetGo());
    return status;
  }

  absl::Status StartFetch(int bucket) override {
    return Use(v1::BucketUse::PREFETCH, bucket, job_->options().call_timeout);
  }
  absl::Status Fetch(int bucket, bool started, absl::Duration timeout) override {
    return Use(started ? v1::BucketUse::AWAIT : v1::BucketUse::ACQUIRE, bucket, timeout);
  }
  absl::Status Drop(int bucket) override { return Use(v1::BucketUse::RELEASE, bucket, job_->options().call_timeout); }

  absl::Status Use(v1::BucketUse::Kind kind, int bucket, absl::Duration timeout) {
    return Called(channel_->UseBucket(kind, bucket, timeout));
  }

  absl::Status SendBucket(v1::DeclareBucketRequest& request, bool declared, absl::Duration timeout) override {
    if (!declared) {
      RETURN_IF_ERROR(CheckGradients(tensors_[request.bucket()], request.step(), *request.mutable_non_finite()));
    }
    request.set_timeout_ms(AttachedChannel::Milliseconds(timeout));
    v1::TrainerRequest message;
    *message.mutable_declare() = request;
    const std::string late = absl::StrCat("bucket ", request.bucket(), " was declared and no other may be");
    return Called(channel_->Call(message, timeout, late).status());
  }

  absl::Status MapWindows(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors) {
    const bool on_device = welcome.device_segments_size() > 0;
    const Plan& plan = job_->plan();
    if (on_device) {
      ASSIGN_OR_RETURN(device_, SessionDevice::MapWindows(welcome, descriptors, plan, slots_.size(), job_->options()));
    }
    RETURN_IF_ERROR(channel_->Map(std::move(descriptors), on_device ? 0 : plan.window_bytes(),
                                  on_device ? 0 : plan.gradient_window_bytes(), parameters_, gradients_));
    committed_ = shardmesh::Step(welcome.committed_step());
    tensors_.resize(bucketed() ? job_->plan().buckets().size() : 1);
    for (size_t t = 0; t < job_->spec().parameters.size(); ++t) {
      const ParameterSpec& parameter = job_->spec().parameters[t];
      if (!parameter.tied_to.empty() || parameter.frozen) continue;
      tensors_[bucketed() ? job_->plan().placements()[t].bucket : 0].push_back(static_cast<int>(t));
    }
    return OpenBuckets();
  }

  // While the gradients are in this process's cache: the workers' pass relies on this check.
  absl::Status CheckGradients(const std::vector<int>& tensors, int64_t step,
                              google::protobuf::RepeatedPtrField<v1::NonFinite>& found) {
    for (size_t s = 0; s < slots_.size(); ++s) {
      for (int t : tensors) {
        const GradientRun run = GradientIn(*job_, t, gradient_window(s));
        const char* gradient = run.data;
        if (device_ != nullptr) {
          ASSIGN_OR_RETURN(gradient, device_->OnHost(gradient, run.num_bytes()));
        }
        int64_t element = 0;
        if (IsFinite({gradient, run.format, run.num_elements}, job_->spec(), &element)) continue;
        if (job_->spec().non_finite == NonFinitePolicy::kFail) {
          return NotFinite(*job_, slots_[s], shardmesh::Step(step), t, element,
                           bucketed() ? "declare the bucket" : "step");
        }
        v1::NonFinite* bad = found.Add();
        bad->set_slot(slots_[s].value());
        bad->set_tensor(t);
        bad->set_element(element);
        break;  // one reason a slot is enough
      }
    }
    return absl::OkStatus();
  }

  const Rank rank_;
  std::unique_ptr<AttachedChannel> channel_;
  std::vector<std::vector<int>> tensors_;  // that have gradients: of each bucket, with full residency of all
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> AttachSession(std::shared_ptr<Job> job, std::vector<Slot> slots,
                                                       AttachOptions options) {
  RETURN_IF_ERROR(CheckSlots(*job, slots));
  ASSIGN_OR_RETURN(const Rank rank, RankToAttachTo(*job, slots[0].value()));
  auto session = std::make_unique<AttachedSession>(std::move(job), std::move(slots), rank);
  RETURN_IF_ERROR(Annotate(session->Open(options), "attaching"));
  return session;
}

}  // namespace shardmesh
