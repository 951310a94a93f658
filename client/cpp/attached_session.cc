// The attached session: windows are the workers' memory, a step is a letter in its slot's mailbox, what concerns
// buckets a message over a UNIX socket.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/next_life.h"
#include "client/cpp/session.h"
#include "client/cpp/session_resume.h"
#include "core/finite.h"
#include "core/status.h"
#include "local/futex.h"
#include "local/host_id.h"
#include "local/mailbox.h"
#include "local/segment.h"
#include "local/socket.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kHandshake = absl::Seconds(10);
constexpr absl::Duration kLook = absl::Milliseconds(20);  // at the socket, while a step waits: is the worker there?
constexpr absl::Duration kRetry = absl::Microseconds(100);
constexpr absl::Duration kFarewell = absl::Milliseconds(200);

class AttachedSession final : public Session {
 public:
  AttachedSession(std::shared_ptr<Job> job, std::vector<Slot> slots, Rank rank)
      : Session(std::move(job), std::move(slots)), rank_(rank) {}

  // A next life that has not heard of this session yet waits for it as long as this process lives.
  ~AttachedSession() override {
    if (!kept_ || socket_ == nullptr || !absl::IsUnavailable(socket_->Receive(absl::ZeroDuration()).status())) return;
    ResumeSession(socket_path_, Hello(), kFarewell).status().IgnoreError();
  }

  // The grant, the socket, the windows.
  absl::Status Open() {
    ASSIGN_OR_RETURN(const std::string host_id, HostId());
    v1::AttachRequest request;
    request.set_job(job_->spec().name);
    request.set_epoch(job_->epoch().value());
    request.set_host_id(host_id);
    for (Slot slot : slots_) request.add_slots(slot.value());
    const auto attach = [&] { return job_->worker(rank_).Attach(request, job_->options().call_timeout); };
    ASSIGN_OR_RETURN(const v1::AttachReply grant,
                     CallAgain(job_->members()[rank_.value()].kept(), job_->peer_timeout(), attach));
    socket_path_ = grant.socket_path();
    ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(socket_path_));
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
    const absl::Time deadline = absl::Now() + options.timeout;
    RETURN_IF_ERROR(DeclareRest(deadline));
    v1::LocalRequest request;
    v1::StepRequest& step = *request.mutable_step();
    step = NewStepRequest(options);
    if (!bucketed()) RETURN_IF_ERROR(CheckGradients(tensors_[0], step.step(), *step.mutable_non_finite()));
    request.set_session(session_);
    request.set_id(session_ << 32 | ++letters_);  // of no other session's letter
    Begin(deadline, Late(absl::StrCat("step ", step.step(), " was not committed"), options.timeout));
    if (kept_) RETURN_IF_ERROR(HearOfLetter());  // a worker that died since the last step must know who it is
    RETURN_IF_ERROR(PostLetter(request.SerializeAsString()));
    ASSIGN_OR_RETURN(v1::StepReply reply, AwaitAnswer(request.id()));
    RETURN_IF_ERROR(BeginNextStep(shardmesh::Step(step.step())));
    return reply;
  }

 private:
  absl::Status StartFetch(int bucket) override {
    return Use(v1::BucketUse::PREFETCH, bucket, job_->options().call_timeout);
  }
  absl::Status Fetch(int bucket, bool started, absl::Duration timeout) override {
    return Use(started ? v1::BucketUse::AWAIT : v1::BucketUse::ACQUIRE, bucket, timeout);
  }
  absl::Status Drop(int bucket) override { return Use(v1::BucketUse::RELEASE, bucket, job_->options().call_timeout); }

  absl::Status Use(v1::BucketUse::Kind kind, int bucket, absl::Duration timeout) {
    v1::LocalRequest request;
    request.mutable_use()->set_kind(kind);
    request.mutable_use()->set_bucket(bucket);
    request.mutable_use()->set_timeout_ms(Milliseconds(timeout));
    return Call(request, absl::Now() + timeout + silence_,
                Late(absl::StrCat("bucket ", bucket, " was not there"), timeout))
        .status();
  }

  absl::Status SendBucket(v1::DeclareBucketRequest& request, bool declared, absl::Duration timeout) override {
    if (!declared) {
      RETURN_IF_ERROR(CheckGradients(tensors_[request.bucket()], request.step(), *request.mutable_non_finite()));
    }
    request.set_timeout_ms(Milliseconds(timeout));
    v1::LocalRequest message;
    *message.mutable_declare() = request;
    return Call(message, absl::Now() + timeout + silence_,
                Late(absl::StrCat("bucket ", request.bucket(), " was declared and no other may be"), timeout))
        .status();
  }

  static std::string Late(absl::string_view what, absl::Duration timeout) {
    return absl::StrCat(what, " within ", absl::FormatDuration(timeout));
  }
  static int64_t Milliseconds(absl::Duration timeout) {
    return std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 1, int64_t{24} * 3600 * 1000);
  }

  // Takes the windows on the device from the end of `descriptors`.
  absl::Status MapOnDevice(const v1::LocalWelcome& welcome, std::vector<UniqueFd>& descriptors) {
    const size_t windows = 1 + slots_.size(), of_host = windows + 1;
    if (!job_->options().device_windows) {
      return absl::FailedPreconditionError(
          absl::StrCat("the windows lie in memory of CUDA device ", welcome.device(), " of worker ", welcome.worker(),
                       "; set ClientOptions::device_windows to have views of it, or take Job::Connect, which goes "
                       "through the host"));
    }
    if (welcome.device_segments_size() != static_cast<int>(windows) || descriptors.size() != of_host + windows) {
      return absl::InternalError(absl::StrCat("the worker sent ", welcome.device_segments_size(),
                                              " windows on its device; ", windows, " expected"));
    }
    std::vector<UniqueFd> there;
    for (size_t i = of_host; i < descriptors.size(); ++i) there.push_back(std::move(descriptors[i]));
    descriptors.resize(of_host);
    ASSIGN_OR_RETURN(device_,
                     SessionDevice::Map(welcome, std::move(there), job_->plan(), job_->options().cuda_library));
    return absl::OkStatus();
  }

  absl::Status MapWindows(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors) {
    const size_t bell = 1 + slots_.size();
    const bool on_device = welcome.device_segments_size() > 0;
    if (on_device) RETURN_IF_ERROR(MapOnDevice(welcome, descriptors));
    gradient_bytes_ = on_device ? 0 : job_->plan().gradient_window_bytes();
    if (descriptors.size() != bell + 1 || welcome.segments_size() != static_cast<int>(bell + 1)) {
      return absl::InternalError(
          absl::StrCat("the worker sent ", descriptors.size(), " windows; ", bell + 1, " expected"));
    }
    for (size_t i = 0; i < descriptors.size(); ++i) {
      const v1::Segment& said = welcome.segments(static_cast<int>(i));
      const int64_t needed = i == 0      ? (on_device ? 0 : job_->plan().window_bytes())
                             : i == bell ? kPageBytes
                                         : gradient_bytes_ + static_cast<int64_t>(sizeof(Mailbox));
      if (said.num_bytes() - said.data_offset() < needed)
        return absl::InternalError("a window is smaller than the plan says");
      ASSIGN_OR_RETURN(Segment segment,
                       Segment::Map(std::move(descriptors[i]), said.num_bytes(), said.data_offset(),
                                    i == 0 ? Segment::Access::kReadOnly : Segment::Access::kReadWrite));
      if (i == 0) {
        parameters_ = std::move(segment);
      } else if (i == bell) {
        bell_ = std::move(segment);
      } else {
        gradients_.push_back(std::move(segment));
      }
    }
    committed_ = shardmesh::Step(welcome.committed_step());
    silence_ = absl::Milliseconds(welcome.heartbeat_timeout_ms());
    session_ = welcome.session();
    kept_ = welcome.kept();
    tensors_.resize(bucketed() ? job_->plan().buckets().size() : 1);
    for (size_t t = 0; t < job_->spec().parameters.size(); ++t) {
      const ParameterSpec& parameter = job_->spec().parameters[t];
      if (!parameter.tied_to.empty() || parameter.frozen) continue;
      tensors_[bucketed() ? job_->plan().placements()[t].bucket : 0].push_back(static_cast<int>(t));
    }
    return OpenBuckets();
  }

  Mailbox& mailbox() const { return MailboxAt(gradients_[0].data() + gradient_bytes_); }

  // While the gradients are in this process's cache: the workers' pass relies on this check.
  absl::Status CheckGradients(const std::vector<int>& tensors, int64_t step,
                              google::protobuf::RepeatedPtrField<v1::NonFinite>& found) {
    const Plan& plan = job_->plan();
    const JobSpec& spec = job_->spec();
    const Format format = plan.gradient_format();
    for (size_t s = 0; s < slots_.size(); ++s) {
      for (int t : tensors) {
        const Placement& at = plan.placements()[t];
        const char* gradient =
            gradient_window(s) + plan.buckets()[at.bucket].gradient_offset + at.offset * BytesPerElement(format);
        if (device_ != nullptr) {
          ASSIGN_OR_RETURN(gradient, device_->OnHost(gradient, at.num_elements * BytesPerElement(format)));
        }
        int64_t element = 0;
        if (AllFiniteBelow(gradient, format, at.num_elements, spec.num_slots, &element)) continue;
        if (spec.non_finite == NonFinitePolicy::kFail) {
          return absl::InvalidArgumentError(absl::StrCat(
              "slot ", slots_[s].value(), " of step ", step, ": the gradient of \"", spec.parameters[t].name,
              "\" at element ", element, " is not finite, or not below FLT_MAX / ", spec.num_slots,
              "; write finite values and ", bucketed() ? "declare the bucket" : "step", " again"));
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

  // What is waited for from here on. `late`: what to say when it did not come.
  void Begin(absl::Time deadline, std::string late) {
    last_heard_ = absl::Now();
    wait_ = {deadline, std::move(late), "the worker did not say yet what is missing"};
  }

  // An answer that the worker sends over the socket within `timeout`; nullopt: none, but it is alive.
  // Unavailable: it is gone, or silent for too long. DeadlineExceeded: of what is waited for.
  absl::StatusOr<std::optional<v1::LocalReply>> Hear(absl::Duration timeout) {
    const absl::StatusOr<LocalMessage> message = socket_->Receive(timeout);
    const absl::Time now = absl::Now();
    if (message.ok()) {
      v1::LocalReply reply;
      if (!reply.ParseFromString(message->bytes))
        return absl::InternalError("the worker sent a message that is no reply");
      last_heard_ = now;
      if (!reply.alive()) return std::make_optional(std::move(reply));
      wait_.for_what = reply.message();
    } else if (!absl::IsDeadlineExceeded(message.status())) {
      RETURN_IF_ERROR(AwaitNextLife(message.status()));
    }
    if (now - last_heard_ > silence_)
      return Gone(absl::UnavailableError(absl::StrCat("it sent nothing for ", absl::FormatDuration(silence_))));
    if (now < wait_.deadline) return std::optional<v1::LocalReply>();
    return absl::DeadlineExceededError(absl::StrCat(wait_.late, "; ", wait_.for_what));
  }

  // One request over the socket and the reply to it; replies to older, repeated calls are passed over.
  absl::StatusOr<v1::LocalReply> Call(v1::LocalRequest& request, absl::Time deadline, const std::string& late) {
    request.set_id(++last_id_);
    Begin(deadline, late);
    if (const absl::Status sent = socket_->Send(request.SerializeAsString(), {}, silence_); !sent.ok())
      return Gone(sent);
    while (true) {
      const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
      ASSIGN_OR_RETURN(const std::optional<v1::LocalReply> reply, Hear(std::min(silence_, left)));
      if (!reply.has_value() || reply->id() != request.id()) continue;
      RETURN_IF_ERROR(StatusOf(*reply));
      return *reply;
    }
  }

  static absl::Status StatusOf(const v1::LocalReply& reply) {
    return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
  }

  // Into the mailbox, and rings. The letter before it, of a call that was given up or of the slot's last trainer, may
  // still lie there.
  absl::Status PostLetter(const std::string& letter) {
    TakeLetter(mailbox().reply, bytes_);  // an answer to such a call would keep the next one back
    auto& bell = *reinterpret_cast<std::atomic<uint32_t>*>(bell_.data());
    while (!PutLetter(mailbox().request, letter)) {
      FutexBump(bell);
      AwaitChange(mailbox().request.taken, mailbox().request.taken.load(), job_->options().spin, kRetry);
      RETURN_IF_ERROR(HearOfLetter());
    }
    FutexBump(bell);
    return absl::OkStatus();
  }

  // The answer to the letter, from the mailbox; answers to calls that were given up are passed over, and this one's may
  // wait for the room.
  absl::StatusOr<v1::StepReply> AwaitAnswer(uint64_t id) {
    Letter& letter = mailbox().reply;
    while (true) {
      const uint32_t seen = letter.number.load();
      if (TakeLetter(letter, bytes_)) {
        v1::LocalReply reply;
        if (!reply.ParseFromString(bytes_)) return absl::InternalError("the worker sent a letter that is no reply");
        if (reply.id() != id) {
          FutexBump(*reinterpret_cast<std::atomic<uint32_t>*>(bell_.data()));
          continue;
        }
        RETURN_IF_ERROR(StatusOf(reply));
        return reply.step();
      }
      AwaitChange(letter.number, seen, job_->options().spin, std::min(kLook, silence_));
      if (letter.number.load() == seen) RETURN_IF_ERROR(HearOfLetter());
    }
  }

  // Why there will be no answer; or OK.
  absl::Status HearOfLetter() {
    ASSIGN_OR_RETURN(const std::optional<v1::LocalReply> reply, Hear(absl::ZeroDuration()));
    return reply.has_value() && reply->id() == 0 ? StatusOf(*reply) : absl::OkStatus();
  }

  v1::SessionHello Hello() const {
    v1::SessionHello hello;
    hello.set_job(job_->spec().name);
    hello.set_epoch(job_->epoch().value());
    hello.set_session(session_);
    for (Slot slot : slots_) hello.add_slots(slot.value());
    return hello;
  }

  // The connection broke. If a keeper has the worker's memory, its next life goes on with this session: windows and
  // letters are as they were.
  absl::Status AwaitNextLife(const absl::Status& cause) {
    if (!kept_) return Gone(cause);
    const absl::Duration left = std::max(wait_.deadline - absl::Now(), absl::ZeroDuration());
    absl::StatusOr<ResumedSession> resumed = ResumeSession(socket_path_, Hello(), std::min(silence_, left));
    if (absl::IsUnavailable(resumed.status()) && absl::Now() >= wait_.deadline) {
      return absl::DeadlineExceededError(absl::StrCat(wait_.late, "; the worker died, and is not back yet"));
    }
    if (!resumed.ok()) return Gone(resumed.status());
    socket_ = std::move(resumed->socket);
    kept_ = resumed->welcome.kept();
    last_heard_ = absl::Now();
    return absl::OkStatus();
  }

  absl::Status Gone(const absl::Status& cause) const {
    const v1::Member& member = job_->members()[rank_.value()];
    return absl::UnavailableError(absl::StrCat("worker ", member.worker(), " (rank ", member.rank(), ", pid ",
                                               member.pid(), ") of job ", job_->spec().name,
                                               " is gone or stopped: ", cause.message()));
  }

  struct Wait {
    absl::Time deadline;
    std::string late, for_what;
  };

  const Rank rank_;
  std::unique_ptr<LocalSocket> socket_;
  std::string socket_path_;
  bool kept_ = false;  // should the worker die it comes back
  Segment bell_;
  int64_t gradient_bytes_ = 0;  // before the mailbox of the first slot
  Wait wait_;
  std::vector<std::vector<int>> tensors_;  // that have gradients: of each bucket, with full residency of all
  uint64_t last_id_ = 0;
  uint32_t letters_ = 0;
  absl::Duration silence_ = absl::Seconds(3);
  uint64_t session_ = 0;
  absl::Time last_heard_;  // of the worker, in a wait
  std::string bytes_;
};

// The member to attach to: of this host, where there are some; trainers spread over them.
Rank RankFor(const Job& job, Slot slot, const std::string& host_id) {
  std::vector<int> local;
  for (const v1::Member& member : job.members()) {
    if (IsOnHost(member.host_id(), host_id)) local.push_back(member.rank());
  }
  if (local.empty()) return Rank(slot.value() % job.plan().num_ranks());  // which says why not
  return Rank(local[slot.value() % local.size()]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> AttachSession(std::shared_ptr<Job> job, std::vector<Slot> slots) {
  RETURN_IF_ERROR(CheckSlots(*job, slots));
  ASSIGN_OR_RETURN(const std::string host_id, HostId());
  const Rank rank = RankFor(*job, slots[0], host_id);
  auto session = std::make_unique<AttachedSession>(std::move(job), std::move(slots), rank);
  RETURN_IF_ERROR(Annotate(session->Open(), "attaching"));
  return session;
}

}  // namespace shardmesh
