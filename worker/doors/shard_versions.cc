// Of ShardService: leases of published versions, and publishing on demand.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "proto/validate.h"
#include "rpc/base/unary.h"
#include "rpc/calls/caller_share.h"
#include "worker/doors/on_demand.h"
#include "worker/doors/shard_service.h"
#include "worker/doors/stalled_call.h"
#include "worker/doors/waiting_call.h"

namespace shardmesh {
namespace {

using OneLease = VersionLeases::Lease;

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

void Fill(const JobShard& shard, const OneLease& lease, v1::Lease& reply) {
  reply.set_id(lease.id);
  reply.set_epoch(shard.epoch().value());
  reply.set_step(lease.step.value());
  reply.set_ttl_ms((lease.expires_nanos - MonotonicNanos()) / 1'000'000);
}

std::string Steps(const JobShard& shard, const std::vector<Step>& steps) {
  const auto append = [](std::string* out, Step step) { absl::StrAppend(out, step.value()); };
  return absl::StrCat("job ", shard.spec().name,
                      " has published: ", steps.empty() ? "nothing" : absl::StrJoin(steps, ", ", append));
}

void AddHolders(const JobShard& shard, v1::ListLeasesReply& reply) {
  for (const VersionLeases::Holder& holder : shard.leases().List()) {
    v1::ListLeasesReply::Holder& to = *reply.add_holders();
    to.set_step(holder.step.value());
    to.set_epoch(shard.epoch().value());
    to.set_lease(holder.lease);
    to.set_seat(holder.place);
    to.set_pid(holder.pid);
    to.set_left_ms(holder.left_nanos / 1'000'000);
  }
  const absl::Time now = MonotonicNow();
  for (const PullsUnderWay::Pull& pull : shard.pulls().List()) {
    v1::ListLeasesReply::Holder& to = *reply.add_holders();
    to.set_step(pull.step.value());
    to.set_epoch(shard.epoch().value());
    to.set_puller(pull.puller);
    const absl::Duration unread = std::max(now - pull.unread_since, absl::ZeroDuration());  // -inf: it reads
    to.set_left_ms(absl::ToInt64Milliseconds(kPullSilence - unread));
  }
}

// The version that is asked for now. nullopt: wait. OutOfRange: an exact one that is not there.
absl::StatusOr<std::optional<OneLease>> TryLease(JobShard& shard, const v1::AcquireLeaseRequest& request,
                                                 const std::string& caller) {
  const bool exact = request.version_case() == v1::AcquireLeaseRequest::kExact;
  const std::vector<Step> published = shard.protocol().publications().Published();
  const int64_t wanted = exact ? request.exact() : request.at_least();
  if (exact || (!published.empty() && published.back().value() >= wanted)) {
    const Step step = exact ? Step(wanted) : published.back();
    ASSIGN_OR_RETURN(const std::optional<OneLease> lease,
                     shard.leases().Acquire(step, absl::Milliseconds(request.ttl_ms()), request.nonce(), caller));
    if (lease.has_value()) return lease;
  }
  if (exact) {
    return absl::OutOfRangeError(absl::StrCat("version ", wanted, " is not there; ", Steps(shard, published)));
  }
  RETURN_IF_ERROR(shard.Health());
  return std::optional<OneLease>();
}

absl::Status CheckPublishes(const JobShard& shard, StepProtocol& protocol) {
  RETURN_IF_ERROR(CheckSupported(shard.spec(), shard.plan(), TopologyOf(shard), Feature::kPublishOnDemand));
  if (protocol.committed_step().value() != kNoStep) return shard.Health();
  return absl::FailedPreconditionError(absl::StrCat("job ", shard.spec().name, " has no initial weights yet"));
}

}  // namespace

grpc::ServerUnaryReactor* ShardService::AcquireLease(grpc::CallbackServerContext* context,
                                                     const v1::AcquireLeaseRequest* request, v1::Lease* reply) {
  std::shared_ptr<JobShard> shard;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.AcquireLease"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(shard, worker_.FindToRead(request->job()));
    return absl::OkStatus();
  });
  if (!status.ok()) return Answer(context, status);
  return WaitingCall::Start(
      *context, shard->waiters(),
      [shard, reply, asked = *request, caller = CallerKey(*context)]() -> std::optional<absl::Status> {
        const absl::StatusOr<std::optional<OneLease>> lease = TryLease(*shard, asked, caller);
        if (!lease.ok()) return lease.status();
        if (!lease->has_value()) return std::nullopt;
        Fill(*shard, **lease, *reply);
        return absl::OkStatus();
      },
      [shard, wanted = request->at_least()] {
        const Publications& publications = shard->protocol().publications();
        return absl::DeadlineExceededError(
            absl::StrCat("no version >= ", wanted, " was published in time; ", Steps(*shard, publications.Published()),
                         "; committed step ", shard->protocol().committed_step().value(), ", publications held by ",
                         publications.Holders(), OnDemandHint(shard->spec())));
      });
}

grpc::ServerUnaryReactor* ShardService::RenewLease(grpc::CallbackServerContext* context,
                                                   const v1::RenewLeaseRequest* request, v1::Lease* reply) {
  return Unary(context, request, reply, [this](const v1::RenewLeaseRequest& q, v1::Lease* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, worker_.FindLeased(q.job(), q.id()));
    RETURN_IF_ERROR(shard->protocol().members().CheckEpoch(q.epoch()));
    if (shard->is_over()) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", q.job(), " left the versions of epoch ", q.epoch(), " behind",
                       ": this lease lasts until its end, and cannot be renewed; acquire one of a version of now"));
    }
    ASSIGN_OR_RETURN(const OneLease lease, shard->leases().Renew(q.id(), q.nonce(), absl::Milliseconds(q.ttl_ms())));
    Fill(*shard, lease, *r);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::ReleaseLease(grpc::CallbackServerContext* context,
                                                     const v1::ReleaseLeaseRequest* request,
                                                     v1::ReleaseLeaseReply* reply) {
  return Unary(context, request, reply, [this](const v1::ReleaseLeaseRequest& q, v1::ReleaseLeaseReply*) {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, worker_.FindLeased(q.job(), q.id()));
    if (!shard->leases().Knows(q.id())) RETURN_IF_ERROR(shard->protocol().members().CheckEpoch(q.epoch()));
    return shard->leases().Release(q.id(), q.nonce());
  });
}

grpc::ServerUnaryReactor* ShardService::ListLeases(grpc::CallbackServerContext* context,
                                                   const v1::ListLeasesRequest* request, v1::ListLeasesReply* reply) {
  return Unary(context, request, reply, [this](const v1::ListLeasesRequest& q, v1::ListLeasesReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard, worker_.FindToRead(q.job()));
    for (const std::shared_ptr<JobShard>& past : worker_.Past(q.job())) AddHolders(*past, *r);
    AddHolders(*shard, *r);
    const Publications& publications = shard->protocol().publications();
    for (shardmesh::Step step : publications.Published()) r->add_published_steps(step.value());
    r->set_epoch(shard->epoch().value());
    r->set_publications(shard->spec().publications);
    r->set_refused(publications.refused());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ShardService::Publish(grpc::CallbackServerContext* context, const v1::PublishRequest* request,
                                                v1::PublishReply* reply) {
  std::shared_ptr<JobShard> shard;
  const absl::Status status = CallWithoutThrowing([&]() -> absl::Status {
    RETURN_IF_ERROR(RequireDeadline(*context, "Shard.Publish"));
    RETURN_IF_ERROR(Validate(*request));
    ASSIGN_OR_RETURN(shard, worker_.Find(request->job()));
    return CheckPublishes(*shard, shard->protocol());
  });
  if (!status.ok()) return Answer(context, status);
  const uint64_t ticket = shard->protocol().tickets().AskToPublish();
  return WaitingCall::Start(
      *context, shard->waiters(),
      [shard, ticket, reply]() -> std::optional<absl::Status> {
        const absl::StatusOr<std::optional<shardmesh::Step>> step = shard->protocol().tickets().PublishedFor(ticket);
        if (!step.ok()) return step.status();
        if (!step->has_value()) {
          const absl::Status health = shard->Health();
          return health.ok() ? std::nullopt : std::make_optional(health);
        }
        reply->set_step((*step)->value());
        reply->set_epoch(shard->epoch().value());
        return absl::OkStatus();
      },
      [] {
        return absl::DeadlineExceededError("nothing was published in time: a step is under way, ask with more time");
      });
}

}  // namespace shardmesh
