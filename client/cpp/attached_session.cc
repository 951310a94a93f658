// The attached session: windows are the workers' memory, a step is one small message over a UNIX socket.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/session.h"
#include "core/finite.h"
#include "core/status.h"
#include "local/host_id.h"
#include "local/segment.h"
#include "local/socket.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kHandshake = absl::Seconds(10);

class AttachedSession final : public Session {
 public:
  AttachedSession(std::shared_ptr<Job> job, std::vector<Slot> slots, Rank rank)
      : Session(std::move(job), std::move(slots)), rank_(rank) {}

  // The grant, the socket, the windows.
  absl::Status Open() {
    ASSIGN_OR_RETURN(const std::string host_id, HostId());
    v1::AttachRequest request;
    request.set_job(job_->spec().name);
    request.set_epoch(job_->epoch().value());
    request.set_host_id(host_id);
    for (Slot slot : slots_) request.add_slots(slot.value());
    ASSIGN_OR_RETURN(const v1::AttachReply grant, job_->worker(rank_).Attach(request, job_->options().call_timeout));
    ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(grant.socket_path()));
    socket_ = std::make_unique<LocalSocket>(std::move(socket));
    v1::LocalHello hello;
    hello.mutable_trainer()->set_token(grant.token());
    RETURN_IF_ERROR(socket_->Send(hello.SerializeAsString(), {}, kHandshake));
    ASSIGN_OR_RETURN(LocalMessage message, socket_->Receive(kHandshake));
    v1::LocalWelcome welcome;
    if (!welcome.ParseFromString(message.bytes))
      return absl::InternalError("the worker sent a message that is no welcome");
    if (welcome.code() != 0) return absl::Status(static_cast<absl::StatusCode>(welcome.code()), welcome.message());
    return MapWindows(welcome, std::move(message.descriptors));
  }

  absl::Status AwaitWeights(absl::Duration timeout) override {
    ASSIGN_OR_RETURN(committed_, AwaitCommittedStep(*job_, rank_, timeout));
    return absl::OkStatus();
  }

  absl::StatusOr<v1::StepReply> Step(const StepOptions& options) override {
    RETURN_IF_ERROR(CheckHasWeights());
    v1::LocalRequest request;
    *request.mutable_step() = NewStepRequest(options);
    RETURN_IF_ERROR(CheckGradients(*request.mutable_step()));
    if (const absl::Status sent = socket_->Send(request.SerializeAsString(), {}, silence_); !sent.ok())
      return Gone(sent);
    ASSIGN_OR_RETURN(v1::StepReply reply, AwaitReply(request.step().step(), options.timeout));
    committed_ = shardmesh::Step(request.step().step());
    return reply;
  }

 private:
  char* gradient_window(int slot_index) const override { return gradients_[slot_index].data(); }
  const char* parameter_window() const override { return parameters_.data(); }

  absl::Status MapWindows(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors) {
    if (descriptors.size() != 1 + slots_.size() || welcome.segments_size() != static_cast<int>(1 + slots_.size())) {
      return absl::InternalError(
          absl::StrCat("the worker sent ", descriptors.size(), " windows; ", 1 + slots_.size(), " expected"));
    }
    for (size_t i = 0; i < descriptors.size(); ++i) {
      const v1::Segment& said = welcome.segments(static_cast<int>(i));
      const int64_t needed = i == 0 ? job_->plan().window_bytes() : job_->plan().gradient_window_bytes();
      if (said.num_bytes() - said.data_offset() < needed)
        return absl::InternalError("a window is smaller than the plan says");
      ASSIGN_OR_RETURN(Segment segment,
                       Segment::Map(std::move(descriptors[i]), said.num_bytes(), said.data_offset(),
                                    i == 0 ? Segment::Access::kReadOnly : Segment::Access::kReadWrite));
      if (i == 0) {
        parameters_ = std::move(segment);
      } else {
        gradients_.push_back(std::move(segment));
      }
    }
    committed_ = shardmesh::Step(welcome.committed_step());
    silence_ = absl::Milliseconds(welcome.heartbeat_timeout_ms());
    return absl::OkStatus();
  }

  // While the gradients are in this process's cache: the workers' pass relies on this check.
  absl::Status CheckGradients(v1::StepRequest& request) const {
    const Format format = job_->plan().gradient_format();
    for (size_t s = 0; s < slots_.size(); ++s) {
      for (size_t t = 0; t < job_->spec().parameters.size(); ++t) {
        if (!job_->spec().parameters[t].tied_to.empty() || job_->spec().parameters[t].frozen) continue;
        const Placement& at = job_->plan().placements()[t];
        const char* gradient = gradients_[s].data() + job_->plan().buckets()[at.bucket].gradient_offset +
                               at.offset * BytesPerElement(format);
        int64_t element = 0;
        if (AllFiniteBelow(gradient, format, at.num_elements, job_->spec().num_slots, &element)) continue;
        if (job_->spec().non_finite == NonFinitePolicy::kFail) {
          return absl::InvalidArgumentError(absl::StrCat(
              "slot ", slots_[s].value(), " of step ", request.step(), ": the gradient of \"",
              job_->spec().parameters[t].name, "\" at element ", element, " is not finite, or not below FLT_MAX / ",
              job_->spec().num_slots, "; write finite values and step again"));
        }
        v1::NonFinite* bad = request.add_non_finite();
        bad->set_slot(slots_[s].value());
        bad->set_tensor(static_cast<int>(t));
        bad->set_element(element);
        break;  // one reason a slot is enough
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<v1::StepReply> AwaitReply(int64_t step, absl::Duration timeout) {
    const absl::Time deadline = absl::Now() + timeout;
    std::string waits_for = "the worker did not say yet what is missing";
    while (true) {
      const absl::Duration left = deadline - absl::Now();
      absl::StatusOr<LocalMessage> message = socket_->Receive(std::min(silence_, std::max(left, absl::ZeroDuration())));
      if (absl::IsDeadlineExceeded(message.status())) {
        if (left > silence_)
          return Gone(absl::UnavailableError(absl::StrCat("it sent nothing for ", absl::FormatDuration(silence_))));
        return absl::DeadlineExceededError(
            absl::StrCat("step ", step, " was not committed within ", absl::FormatDuration(timeout), "; ", waits_for));
      }
      if (!message.ok()) return Gone(message.status());
      v1::LocalReply reply;
      if (!reply.ParseFromString(message->bytes))
        return absl::InternalError("the worker sent a message that is no reply");
      if (reply.alive()) waits_for = reply.message();
      if (reply.alive() || reply.step().step() != step) continue;  // not yet, or the answer to an older, repeated call
      if (reply.code() != 0) return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
      return reply.step();
    }
  }

  absl::Status Gone(const absl::Status& cause) const {
    const v1::Member& member = job_->members()[rank_.value()];
    return absl::UnavailableError(absl::StrCat("worker ", member.worker(), " (rank ", member.rank(), ", pid ",
                                               member.pid(), ") of job ", job_->spec().name,
                                               " is gone or stopped: ", cause.message()));
  }

  const Rank rank_;
  std::unique_ptr<LocalSocket> socket_;
  Segment parameters_;
  std::vector<Segment> gradients_;
  absl::Duration silence_ = absl::Seconds(3);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> AttachSession(std::shared_ptr<Job> job, std::vector<Slot> slots) {
  RETURN_IF_ERROR(CheckSlots(*job, slots));
  const Rank rank(slots[0].value() % job->plan().num_ranks());  // trainers spread over the host's workers
  auto session = std::make_unique<AttachedSession>(std::move(job), std::move(slots), rank);
  RETURN_IF_ERROR(Annotate(session->Open(), "attaching"));
  return session;
}

}  // namespace shardmesh
