#include "worker/doors/shard_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "proto/bulk.h"
#include "proto/validate.h"
#include "rpc/base/unary.h"
#include "rpc/calls/caller_share.h"
#include "worker/doors/job_status.h"
#include "worker/doors/progress_call.h"
#include "worker/doors/pull_call.h"
#include "worker/doors/push_call.h"
#include "worker/doors/seat_call.h"
#include "worker/doors/transfer_call.h"
#include "worker/doors/waiting_call.h"
#include "worker/move/shard_files.h"

namespace shardmesh {
namespace {

// Answers a unary call at once.
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

// A call that works on files of a job's shard.
template <class Request, class Work>
grpc::ServerWriteReactor<v1::FileProgress>* StartProgress(Worker& worker, grpc::CallbackServerContext& context,
                                                          const char* method, const Request& request, Work work) {
  std::shared_ptr<JobShard> shard;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(context, method));
    RETURN_IF_ERROR(Validate(request));
    ASSIGN_OR_RETURN(shard, worker.Find(request.job()));
    return absl::OkStatus();
  });
  return ProgressCall::Start(status, [shard, request, work, folders = worker.options().checkpoint_folders](
                                         const std::atomic<bool>& cancelled, const ReportProgress& report) {
    return work(*shard, folders, request, cancelled, report);
  });
}

// Slots whose trainer waits, as long as the object lives.
class BucketWait {
 public:
  BucketWait(std::shared_ptr<JobShard> shard, const v1::DeclareBucketRequest& request)
      : shard_(std::move(shard)), step_(request.step()) {
    for (int slot : request.slots()) slots_.push_back(Slot(slot));
    protocol().buckets().SetWaiting(slots_, true);
  }
  ~BucketWait() { protocol().buckets().SetWaiting(slots_, false); }
  BucketWait(const BucketWait&) = delete;
  BucketWait& operator=(const BucketWait&) = delete;

  JobShard& shard() const { return *shard_; }
  StepProtocol& protocol() const { return shard_->protocol(); }
  const std::vector<Slot>& slots() const { return slots_; }
  shardmesh::Step step() const { return step_; }

 private:
  const std::shared_ptr<JobShard> shard_;
  const shardmesh::Step step_;
  std::vector<Slot> slots_;
};

}  // namespace

grpc::ServerReadReactor<grpc::ByteBuffer>* ShardService::Push(grpc::CallbackServerContext* context,
                                                              grpc::ByteBuffer* reply) {
  return PushCall::Start(worker_, seats_, reply, RequireDeadline(*context, "Shard.Push"));
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ShardService::Pull(grpc::CallbackServerContext* context,
                                                               const grpc::ByteBuffer* raw) {
  v1::PullRequest request;
  const auto find = [&]() -> absl::StatusOr<std::shared_ptr<JobShard>> {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Pull"));
    RETURN_IF_ERROR(DecodeMessage(*raw, request));
    RETURN_IF_ERROR(Validate(request));
    if (request.version_case() == v1::PullRequest::kLease) return worker_.FindLeased(request.job(), request.lease());
    if (request.version_case() == v1::PullRequest::kForSlot) return worker_.Find(request.job());
    return worker_.FindToRead(request.job());
  };
  absl::StatusOr<std::shared_ptr<JobShard>> shard = find();
  return PullCall::Start(*context, std::move(shard), request);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ShardService::Transfer(grpc::CallbackServerContext* context,
                                                                   const grpc::ByteBuffer* raw) {
  std::unique_ptr<TransferSource> source;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    v1::TransferRequest request;
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Transfer"));
    RETURN_IF_ERROR(DecodeMessage(*raw, request));
    RETURN_IF_ERROR(Validate(request));
    if (request.has_kept()) {
      ASSIGN_OR_RETURN(std::shared_ptr<PeerCopies> copies,
                       worker_.FindCopies(request.job(), request.epoch(), request.secret()));
      ASSIGN_OR_RETURN(source, TransferSource::Open(std::move(copies), request));
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(std::shared_ptr<JobShard> held,
                     worker_.FindHeld(request.job(), request.epoch(), request.secret()));
    ASSIGN_OR_RETURN(source, TransferSource::Open(std::move(held), request));
    return absl::OkStatus();
  });
  return TransferCall::Start(status, std::move(source));
}

grpc::ServerUnaryReactor* ShardService::Step(grpc::CallbackServerContext* context, const v1::StepRequest* request,
                                             v1::StepReply* reply) {
  std::shared_ptr<JobShard> shard;
  std::optional<StepOutcome> known;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Step"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(shard, worker_.Find(request->job()));
    ASSIGN_OR_RETURN(known, shard->requests().Declare(*request, /*attached=*/false));
    return absl::OkStatus();
  });
  if (!status.ok()) return Answer(context, status);
  if (known.has_value()) {
    *reply = shard->requests().ToReply(*known);
    return Answer(context, absl::OkStatus());
  }
  const shardmesh::Step step(request->step());
  return WaitingCall::Start(
      *context, shard->waiters(),
      [shard, step, reply, declared = *request]() -> std::optional<absl::Status> {
        const absl::StatusOr<StepOutcome> outcome =
            shard->protocol().outcomes().AwaitCommit(step, absl::ZeroDuration());
        if (absl::IsDeadlineExceeded(outcome.status())) {
          absl::Status health = shard->Health();
          if (health.ok()) health = shard->requests().CheckStands(declared);
          return health.ok() ? std::nullopt : std::make_optional(health);
        }
        if (outcome.ok()) *reply = shard->requests().ToReply(*outcome);
        return outcome.status();
      },
      [shard, step] {
        return absl::DeadlineExceededError(absl::StrCat("step ", step.value(), " was not committed in time; ",
                                                        shard->protocol().outcomes().WaitsFor(step)));
      });
}

grpc::ServerUnaryReactor* ShardService::DeclareBucket(grpc::CallbackServerContext* context,
                                                      const v1::DeclareBucketRequest* request,
                                                      v1::DeclareBucketReply* reply) {
  std::shared_ptr<JobShard> shard;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.DeclareBucket"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(shard, worker_.Find(request->job()));
    ASSIGN_OR_RETURN(const bool before, shard->requests().DeclareBucket(*request, /*attached=*/false));
    reply->set_already_declared(before);
    return absl::OkStatus();
  });
  if (!status.ok()) return Answer(context, status);
  const auto wait = std::make_shared<BucketWait>(shard, *request);
  return WaitingCall::Start(
      *context, shard->waiters(),
      [wait]() -> std::optional<absl::Status> {
        const absl::Status there =
            wait->protocol().buckets().AwaitSums(wait->slots(), wait->step(), absl::ZeroDuration());
        if (!absl::IsDeadlineExceeded(there)) return there;
        const absl::Status health = wait->shard().Health();
        return health.ok() ? std::nullopt : std::make_optional(health);
      },
      [wait] { return wait->protocol().buckets().AwaitSums(wait->slots(), wait->step(), absl::ZeroDuration()); });
}

// The doors are the same as those of single requests, and so are their answers.
grpc::ServerUnaryReactor* ShardService::Trainer(grpc::CallbackServerContext* context, const v1::TrainerRequest* request,
                                                v1::TrainerReply* reply) {
  if (request->has_step() && Validate(*request).ok()) {
    reply->set_id(request->id());
    return Step(context, &request->step(), reply->mutable_step());
  }
  if (request->has_declare() && Validate(*request).ok()) {
    reply->set_id(request->id());
    return DeclareBucket(context, &request->declare(), reply->mutable_declare());
  }
  std::shared_ptr<SeatSession> session;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Trainer"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(session, seats_.Find(request->session()));
    return absl::OkStatus();
  });
  return status.ok() ? SeatRequestCall::Start(*context, *session, *request, reply) : Answer(context, status);
}

// Without a deadline: it is open as long as the trainer trains.
grpc::ServerWriteReactor<v1::SeatReply>* ShardService::Seat(grpc::CallbackServerContext*,
                                                            const v1::SeatRequest* request) {
  const auto find = [&]() -> absl::StatusOr<std::shared_ptr<JobShard>> {
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(std::shared_ptr<JobShard> shard, worker_.Find(request->job()));
    RETURN_IF_ERROR(shard->protocol().members().CheckEpoch(request->epoch()));
    return shard;
  };
  return SeatCall::Start(find(), local_, seats_);
}

grpc::ServerUnaryReactor* ShardService::Attach(grpc::CallbackServerContext* context, const v1::AttachRequest* request,
                                               v1::AttachReply* reply) {
  return Unary(context, request, reply, [&](const v1::AttachRequest& q, v1::AttachReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(std::shared_ptr<JobShard> shard, worker_.Find(q.job()));
    RETURN_IF_ERROR(shard->protocol().members().CheckEpoch(q.epoch()));
    if (q.host_id() != host_id_) {
      return absl::FailedPreconditionError(absl::StrCat("host id \"", q.host_id(), "\" is not this worker's, \"",
                                                        host_id_, "\": memory cannot be shared; use Push and Pull"));
    }
    if (q.reader_ttl_ms() != 0) {
      RETURN_IF_ERROR(CheckSupported(shard->spec(), shard->plan(), TopologyOf(*shard), Feature::kMappedReaders));
      ASSIGN_OR_RETURN(*r->mutable_token(),
                       local_.GrantReader(shard, absl::Milliseconds(q.reader_ttl_ms()), CallerKey(*context)));
      r->set_socket_path(local_.path());
      return absl::OkStatus();
    }
    if (shard->spec().pulled() != q.slots().empty()) {
      return absl::InvalidArgumentError(absl::StrCat("job ", q.job(),
                                                     shard->spec().pulled()
                                                         ? " has pulled slots: attach to none (Job::AttachPulling)"
                                                         : " has assigned slots: name those to attach to"));
    }
    for (int slot : q.slots()) {
      if (slot < 0 || slot >= shard->spec().num_slots) {
        return absl::InvalidArgumentError(
            absl::StrCat("slot ", slot, " is none of job ", q.job(), "'s: 0 to ", shard->spec().num_slots - 1));
      }
    }
    ASSIGN_OR_RETURN(*r->mutable_token(),
                     local_.Grant(shard, {q.slots().begin(), q.slots().end()}, CallerKey(*context)));
    r->set_socket_path(local_.path());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::Digest(grpc::CallbackServerContext* context, const v1::DigestRequest* request,
                                               v1::DigestReply* reply) {
  std::shared_ptr<JobShard> shard;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Digest"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(shard, worker_.Find(request->job()));
    if (shard->protocol().committed_step().value() == kNoStep) {
      return absl::FailedPreconditionError(absl::StrCat("job ", request->job(), " has no initial weights yet"));
    }
    return shard->Health();
  });
  if (!status.ok()) return Answer(context, status);
  const uint64_t ticket = shard->protocol().tickets().AskForDigest();
  return WaitingCall::Start(
      *context, shard->waiters(),
      [shard, ticket, reply]() -> std::optional<absl::Status> {
        const auto digest = shard->protocol().tickets().DigestOf(ticket);
        if (!digest.ok()) return digest.status();
        if (!digest->has_value()) {
          const absl::Status health = shard->Health();
          return health.ok() ? std::nullopt : std::make_optional(health);
        }
        reply->set_step((*digest)->first.value());
        reply->set_digest((*digest)->second);
        return absl::OkStatus();
      },
      [] {
        return absl::DeadlineExceededError("the digest did not come in time: a step is under way, ask with more time");
      });
}

grpc::ServerWriteReactor<v1::FileProgress>* ShardService::Save(grpc::CallbackServerContext* context,
                                                               const v1::SaveRequest* request) {
  return StartProgress(worker_, *context, "Shard.Save", *request, SaveShard);
}

grpc::ServerWriteReactor<v1::FileProgress>* ShardService::Copy(grpc::CallbackServerContext* context,
                                                               const v1::CopyRequest* request) {
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Copy"));
    return Validate(*request);
  });
  return ProgressCall::Start(
      status, [this, asked = *request](const std::atomic<bool>& cancelled, const ReportProgress& report) {
        return worker_.Copy(asked, cancelled, report);
      });
}

grpc::ServerWriteReactor<v1::FileProgress>* ShardService::Load(grpc::CallbackServerContext* context,
                                                               const v1::LoadRequest* request) {
  return StartProgress(worker_, *context, "Shard.Load", *request, LoadShard);
}

grpc::ServerUnaryReactor* ShardService::UseLoaded(grpc::CallbackServerContext* context,
                                                  const v1::UseLoadedRequest* request, v1::UseLoadedReply* reply) {
  return Unary(context, request, reply, [this](const v1::UseLoadedRequest& q, v1::UseLoadedReply*) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, worker_.Find(q.job()));
    return shardmesh::UseLoaded(*shard, q);
  });
}

grpc::ServerUnaryReactor* ShardService::AwaitWeights(grpc::CallbackServerContext* context,
                                                     const v1::AwaitWeightsRequest* request,
                                                     v1::AwaitWeightsReply* reply) {
  std::shared_ptr<JobShard> shard;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.AwaitWeights"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(shard, worker_.Find(request->job()));
    return shard->protocol().members().CheckEpoch(request->epoch());
  });
  if (!status.ok()) return Answer(context, status);
  return WaitingCall::Start(
      *context, shard->waiters(),
      [shard, reply]() -> std::optional<absl::Status> {
        const absl::Status health = shard->Health();
        if (!health.ok()) return health;
        reply->set_step(shard->protocol().committed_step().value());
        return reply->step() == kNoStep ? std::nullopt : std::make_optional(absl::OkStatus());
      },
      [shard] {
        return absl::DeadlineExceededError(
            absl::StrCat("job ", shard->spec().name,
                         " has no weights yet: push initial weights to every member, or restore a "
                         "checkpoint into it; or ask with more time"));
      });
}

grpc::ServerUnaryReactor* ShardService::GetStatus(grpc::CallbackServerContext* context,
                                                  const v1::GetStatusRequest* request, v1::GetStatusReply* reply) {
  return Unary(context, request, reply, [this](const v1::GetStatusRequest& q, v1::GetStatusReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    r->set_worker(worker_.options().name);
    r->set_incarnation(incarnation_.load());
    r->set_device(worker_.DeviceText());
    for (const std::shared_ptr<JobShard>& shard : worker_.Jobs()) FillStatus(*shard, *r->add_jobs());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::GetTrace(grpc::CallbackServerContext* context,
                                                 const v1::GetTraceRequest* request, v1::GetTraceReply* reply) {
  return Unary(context, request, reply, [this](const v1::GetTraceRequest& q, v1::GetTraceReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, worker_.Find(q.job()));
    FillTrace(*shard, *r);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::Meet(grpc::CallbackServerContext* context, const v1::MeetRequest* request,
                                             v1::MeetReply* reply) {
  return Unary(context, request, reply, [this](const v1::MeetRequest& q, v1::MeetReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(*r, worker_.Meet(q));
    return absl::OkStatus();
  });
}

}  // namespace shardmesh
