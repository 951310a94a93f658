#include "server/service/coordinator_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"
#include "proto/convert.h"
#include "proto/protocol_version.h"
#include "proto/validate.h"
#include "rpc/base/main_support.h"
#include "rpc/base/unary.h"
#include "rpc/calls/caller.h"
#include "server/service/coordinator_messages.h"

namespace shardmesh {
namespace {

// Of Hosts.Heartbeats.
constexpr int kMaxHostHeartbeats = 1024;      // in one message, and places of a call
// Of a time-out, within which a message that says nothing new may be left out. So a host whose heartbeats are not late is
// heard at least every two fifths of a time-out, and the coordinator doubts nobody before half of one (coordinator_hosts.cc).
constexpr int kSkipPart = 5;
constexpr size_t kMaxKeptBytes = 4 << 10;     // of a heartbeat that is kept: of a worker of a dozen jobs
constexpr size_t kMaxReplyBytes = 32u << 20;  // beyond it no more assignments are told

int64_t RandomUid() {
  std::random_device random;
  return static_cast<int64_t>((static_cast<uint64_t>(random()) << 31 ^ random()) & 0x7ffffffffffffffe) + 1;
}

void Log(const std::vector<std::string>& events) {
  for (const std::string& event : events) {
    const bool bad = absl::StartsWith(event, "event=job_failed") || absl::StartsWith(event, "event=worker_dead") ||
                     absl::StartsWith(event, "event=job_reforms") || absl::StartsWith(event, "event=plan_differs") ||
                     absl::StartsWith(event, "event=held_up") || absl::StartsWith(event, "event=reshard_given_up") ||
                     absl::StartsWith(event, "event=job_awaits") || absl::StartsWith(event, "event=job_goes_back") ||
                     absl::StartsWith(event, "event=checkpoint_passed_over") ||
                     absl::StartsWith(event, "event=other_state_file");
    spdlog::log(bad ? spdlog::level::warn : spdlog::level::info, "{}", event);
  }
}

// With a refusal for a worker's incarnation: which one would be taken.
absl::Status TellNext(grpc::CallbackServerContext& context, const absl::Status& status) {
  if (const auto next = NextIncarnationOf(status); next.has_value()) {
    context.AddTrailingMetadata(kNextIncarnationKey, absl::StrCat(*next));
  }
  return status;
}

// Before a call that takes something away from others: who asks for it. What comes of it is logged after.
void LogCaller(const char* call, const std::string& what, const grpc::ServerContextBase& context) {
  spdlog::info("event=asked call={} of={} caller={}", call, Quoted(what), Quoted(CallerOf(context)));
}

// Its answer, and a line of the log where that is a refusal.
absl::Status LogRefusal(const char* call, const std::string& what, const grpc::ServerContextBase& context,
                        const absl::Status& status) {
  if (!status.ok()) {
    spdlog::warn("event=refused call={} of={} caller={} error={}", call, Quoted(what), Quoted(CallerOf(context)),
                 Quoted(status.message()));
  }
  return status;
}

}  // namespace

CoordinatorService::CoordinatorService(CoordinatorServiceOptions options,
                                       std::unique_ptr<shardmesh::Coordinator> coordinator, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      coordinator_(std::move(coordinator)),
      room_(options_.max_jobs, options_.max_spec_bytes) {}

template <typename Fn>
auto CoordinatorService::Locked(Fn fn) {
  std::vector<std::string> events;
  auto result = [&] {
    MutexLock lock(mu_);
    auto inner = fn(*coordinator_, clock_.Now());
    events = coordinator_->TakeEvents();
    return inner;
  }();
  Log(events);
  return result;
}

absl::Status CoordinatorService::Tick() {
  return Locked([](shardmesh::Coordinator& coordinator, absl::Time now) { return coordinator.Tick(now); });
}

absl::Status CoordinatorService::TickHosts() {
  return Locked([](shardmesh::Coordinator& coordinator, absl::Time now) { return coordinator.TickHosts(now); });
}

absl::StatusOr<bool> CoordinatorService::CreateWithRoom(shardmesh::Coordinator& coordinator, absl::Time now,
                                                        const std::shared_ptr<const JobDefinition>& definition,
                                                        int64_t uid, int64_t replaces, const std::string& caller,
                                                        int64_t spec_bytes) {
  const std::string& name = definition->spec().name;
  const absl::StatusOr<JobView> there = coordinator.DescribeJob(name, now);
  const bool adds = there.ok() ? replaces != 0 && there->uid == replaces && uid != replaces : replaces == 0;
  if (!adds) return coordinator.CreateJob(definition, now, uid, replaces);
  room_.Learn(coordinator.ListJobs(now));
  RETURN_IF_ERROR(room_.Check(caller, name, spec_bytes));
  ASSIGN_OR_RETURN(const bool created, coordinator.CreateJob(definition, now, uid, replaces));
  room_.Take(caller, name, uid, spec_bytes);
  return created;
}

grpc::ServerUnaryReactor* CoordinatorService::CreateJob(grpc::CallbackServerContext* context,
                                                        const v1::CreateJobRequest* request,
                                                        v1::CreateJobReply* reply) {
  return Unary(context, request, reply, [&](const v1::CreateJobRequest& q, v1::CreateJobReply* r) -> absl::Status {
    RETURN_IF_ERROR(CheckProtocol(q.protocol(), "the caller"));
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(JobSpec spec, JobSpecFromProto(q.spec()));
    if (q.fit_mesh()) {
      const int64_t live =
          Locked([](shardmesh::Coordinator& coordinator, absl::Time now) { return coordinator.MostLiveWorkers(now); });
      spec.mesh = FittingMesh(spec.mesh, options_.default_mesh, live);
    }
    ASSIGN_OR_RETURN(auto definition, DefineJob(std::move(spec), NameRulesFromProto(q.names()), options_.default_mesh));
    const int64_t uid = q.uid() != 0 ? q.uid() : RandomUid();
    const std::string caller = options_.caller_key(*context);
    const int64_t spec_bytes = JobRoom::BytesOf(*definition);
    std::pair<bool, JobView> result;
    const auto create = [&](shardmesh::Coordinator& coordinator, absl::Time now)
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
      ASSIGN_OR_RETURN(result.first,
                       CreateWithRoom(coordinator, now, definition, uid, q.replaces_uid(), caller, spec_bytes));
      ASSIGN_OR_RETURN(result.second, coordinator.DescribeJob(definition->spec().name, now));
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(Locked(create));
    r->set_created(result.first);
    *r->mutable_job() = ToProto(result.second, true);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CoordinatorService::DescribeJob(grpc::CallbackServerContext* context,
                                                          const v1::DescribeJobRequest* request,
                                                          v1::JobDescription* reply) {
  return Unary(context, request, reply, [this](const v1::DescribeJobRequest& q, v1::JobDescription* r) -> absl::Status {
    RETURN_IF_ERROR(CheckProtocol(q.protocol(), "the caller"));
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const JobView view, Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
                       return coordinator.DescribeJob(q.job(), now);
                     }));
    *r = ToProto(view, true);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CoordinatorService::ListJobs(grpc::CallbackServerContext* context,
                                                       const v1::ListJobsRequest* request, v1::ListJobsReply* reply) {
  return Unary(context, request, reply, [this](const v1::ListJobsRequest& q, v1::ListJobsReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    const std::vector<JobView> views =
        Locked([](shardmesh::Coordinator& coordinator, absl::Time now) { return coordinator.ListJobs(now); });
    for (const JobView& view : views) *r->add_jobs() = ToProto(view, false);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CoordinatorService::DeleteJob(grpc::CallbackServerContext* context,
                                                        const v1::DeleteJobRequest* request,
                                                        v1::DeleteJobReply* reply) {
  return Unary(context, request, reply, [&](const v1::DeleteJobRequest& q, v1::DeleteJobReply*) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    LogCaller("DeleteJob", q.job(), *context);
    return LogRefusal("DeleteJob", q.job(), *context,
                      Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
                        return coordinator.DeleteJob(q.job(), now, q.uid());
                      }));
  });
}

grpc::ServerUnaryReactor* CoordinatorService::ReshardJob(grpc::CallbackServerContext* context,
                                                         const v1::ReshardJobRequest* request,
                                                         v1::JobDescription* reply) {
  return Unary(context, request, reply, [&](const v1::ReshardJobRequest& q, v1::JobDescription* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    LogCaller("ReshardJob", q.job(), *context);
    ASSIGN_OR_RETURN(const MeshSpec mesh, MeshSpecFromProto(q.mesh()));
    JobView view;
    const absl::Status begun =
        Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) -> absl::Status {
          RETURN_IF_ERROR(coordinator.Reshard(q.job(), mesh, now));
          ASSIGN_OR_RETURN(view, coordinator.DescribeJob(q.job(), now));
          return absl::OkStatus();
        });
    RETURN_IF_ERROR(LogRefusal("ReshardJob", q.job(), *context, begun));
    *r = ToProto(view, true);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CoordinatorService::RecordCheckpoint(grpc::CallbackServerContext* context,
                                                               const v1::RecordCheckpointRequest* request,
                                                               v1::RecordCheckpointReply* reply) {
  return Unary(
      context, request, reply, [&](const v1::RecordCheckpointRequest& q, v1::RecordCheckpointReply*) -> absl::Status {
        RETURN_IF_ERROR(Validate(q));
        LogCaller("RecordCheckpoint", q.job(), *context);
        const CheckpointRecord checkpoint{q.checkpoint().folder(), q.checkpoint().step(), q.checkpoint().digest()};
        return LogRefusal("RecordCheckpoint", q.job(), *context,
                          Locked([&](shardmesh::Coordinator& coordinator, absl::Time) {
                            return coordinator.RecordCheckpoint(q.job(), q.uid(), q.epoch(), checkpoint);
                          }));
      });
}

grpc::ServerUnaryReactor* CoordinatorService::ResolveNames(grpc::CallbackServerContext* context,
                                                           const v1::ResolveNamesRequest* request,
                                                           v1::ResolveNamesReply* reply) {
  return Unary(context, request, reply,
               [this](const v1::ResolveNamesRequest& q, v1::ResolveNamesReply* r) -> absl::Status {
                 RETURN_IF_ERROR(Validate(q));
                 ASSIGN_OR_RETURN(const auto definition, Locked([&](shardmesh::Coordinator& coordinator, absl::Time) {
                                    return coordinator.Definition(q.job());
                                  }));
                 ASSIGN_OR_RETURN(const std::vector<ResolvedName> names,
                                  shardmesh::ResolveNames(*definition, {q.raw_names().begin(), q.raw_names().end()},
                                                          NameRulesFromProto(q.rules())));
                 for (const ResolvedName& name : names) {
                   v1::ResolveNamesReply::Resolved* resolved = r->add_names();
                   resolved->set_canonical(name.canonical);
                   resolved->set_tensor(name.tensor);
                 }
                 return absl::OkStatus();
               });
}

grpc::ServerUnaryReactor* CoordinatorService::GetPlan(grpc::CallbackServerContext* context,
                                                      const v1::GetPlanRequest* request, v1::GetPlanReply* reply) {
  return Unary(context, request, reply, [this](const v1::GetPlanRequest& q, v1::GetPlanReply* r) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    ASSIGN_OR_RETURN(const auto definition, Locked([&](shardmesh::Coordinator& coordinator, absl::Time) {
                       return coordinator.Definition(q.job());
                     }));
    *r = PlanToProto(*definition);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CoordinatorService::ListVersions(grpc::CallbackServerContext* context,
                                                           const v1::ListVersionsRequest* request,
                                                           v1::ListVersionsReply* reply) {
  return Unary(context, request, reply,
               [this](const v1::ListVersionsRequest& q, v1::ListVersionsReply* r) -> absl::Status {
                 RETURN_IF_ERROR(Validate(q));
                 ASSIGN_OR_RETURN(const JobView view, Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
                                    return coordinator.DescribeJob(q.job(), now);
                                  }));
                 r->set_committed_step(view.committed_step);
                 r->set_epoch(view.epoch);
                 for (int64_t step : view.published_steps) r->add_published_steps(step);
                 return absl::OkStatus();
               });
}

grpc::ServerUnaryReactor* CoordinatorService::Join(grpc::CallbackServerContext* context, const v1::JoinRequest* request,
                                                   v1::JoinReply* reply) {
  return Unary(context, request, reply, [this, context](const v1::JoinRequest& q, v1::JoinReply* r) -> absl::Status {
    RETURN_IF_ERROR(CheckProtocol(q.protocol(), absl::StrCat("worker ", q.name())));
    RETURN_IF_ERROR(Validate(q));
    LogCaller("Join", q.name(), *context);
    const absl::Status joined = Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
      return coordinator.Join(IdentityFromProto(q), now, TraitsFromProto(q), LastIncarnationFromProto(q),
                              options_.wall(), q.secret());
    });
    RETURN_IF_ERROR(LogRefusal("Join", q.name(), *context, TellNext(*context, joined)));
    r->set_heartbeat_interval_ms(absl::ToInt64Milliseconds(options_.heartbeat_interval));
    r->set_heartbeat_timeout_ms(absl::ToInt64Milliseconds(options_.heartbeat_timeout));
    *r->mutable_protocol() = OwnProtocol();
    return absl::OkStatus();
  });
}

namespace {

absl::StatusOr<std::vector<Assignment>> Hear(shardmesh::Coordinator& coordinator, absl::Time now,
                                             const v1::HeartbeatRequest& q) {
  coordinator.TakeCopies(q.name(), q.incarnation(), q.secret(), CopiesFromProto(q));
  return coordinator.Heartbeat(q.name(), q.incarnation(), ReportsFromProto(q), now, TraitsFromProto(q), q.secret());
}

v1::HeartbeatReply AnswerTo(const v1::HeartbeatRequest& q, const std::vector<Assignment>& assignments) {
  v1::HeartbeatReply reply;
  for (const Assignment& assignment : assignments) {
    const bool leaves = assignment.from.epoch == assignment.epoch;  // it is told with whom it ends the epoch
    const bool known = !leaves && std::any_of(q.jobs().begin(), q.jobs().end(), [&](const v1::MemberStatus& status) {
      return status.job() == assignment.definition->spec().name && status.epoch() == assignment.epoch;
    });
    if (!known && assignment.back.has_value() && assignment.back->copied_at > 0 && !assignment.copies.whole) {
      continue;  // it could not read them: it is told when it can
    }
    *reply.add_assignments() = ToProto(assignment, known);
  }
  return reply;
}

}  // namespace

grpc::ServerUnaryReactor* CoordinatorService::Heartbeat(grpc::CallbackServerContext* context,
                                                        const v1::HeartbeatRequest* request,
                                                        v1::HeartbeatReply* reply) {
  return Unary(
      context, request, reply, [this, context](const v1::HeartbeatRequest& q, v1::HeartbeatReply* r) -> absl::Status {
        RETURN_IF_ERROR(Validate(q));
        const auto assignments =
            Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) { return Hear(coordinator, now, q); });
        RETURN_IF_ERROR(TellNext(*context, assignments.status()));
        *r = AnswerTo(q, *assignments);
        return absl::OkStatus();
      });
}

namespace {

absl::Status CheckPlaces(const v1::HostHeartbeats& request) {
  if (request.workers_size() > kMaxHostHeartbeats) {
    return absl::ResourceExhaustedError(
        absl::StrCat(request.workers_size(), " heartbeats in a message; send at most ", kMaxHostHeartbeats));
  }
  std::set<int> places;
  for (const v1::HostHeartbeats::Worker& worker : request.workers()) {
    if (worker.place() < 0 || worker.place() >= kMaxHostHeartbeats) {
      return absl::InvalidArgumentError(
          absl::StrCat("place is ", worker.place(), "; it is 0 to ", kMaxHostHeartbeats - 1));
    }
    if (!places.insert(worker.place()).second) {
      return absl::InvalidArgumentError(absl::StrCat("place ", worker.place(), " comes twice in a message"));
    }
  }
  return absl::OkStatus();
}

// Of a message that names no workers.
absl::Status CheckAgain(const v1::HostHeartbeats& request, const KnownHost& host) {
  if (request.workers_size() > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message is `again` and has ", request.workers_size(), " workers; leave out one or the other"));
  }
  if (!host.takes_again) {
    return absl::InvalidArgumentError(
        "a message is `again`, but the last reply has no `takes_again`; name the workers");
  }
  return absl::OkStatus();
}

// Of one of a HostHeartbeats, before the coordinator hears it.
absl::Status CheckHeartbeat(const v1::HostHeartbeats::Worker& worker, const std::map<int, KnownHeartbeat>& known) {
  if (worker.has_heartbeat()) return Validate(worker.heartbeat());
  if (known.count(worker.place()) > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("no heartbeat of place ", worker.place(), " was kept in this call; send it"));
}

}  // namespace

absl::Status CoordinatorService::Heartbeats(const v1::HostHeartbeats& request, KnownHost& host,
                                            v1::HostHeartbeatReplies& replies) {
  if (!request.again()) {
    RETURN_IF_ERROR(CheckPlaces(request));
    host.last.clear();
    for (const v1::HostHeartbeats::Worker& worker : request.workers()) host.last.push_back(worker.place());
    HearEach(request, host, replies);
  } else {
    RETURN_IF_ERROR(CheckAgain(request, host));
    replies.set_same(HearAgain(host));
    if (!replies.same()) {
      v1::HostHeartbeats named;
      for (const int place : host.last) named.add_workers()->set_place(place);
      HearEach(named, host, replies);
    }
  }
  replies.set_takes_again(host.takes_again);
  if (host.may_skip) replies.set_skip_within_ms(absl::ToInt64Milliseconds(options_.heartbeat_timeout / kSkipPart));
  return absl::OkStatus();
}

// Whether each of `host.last` is heard so.
bool CoordinatorService::HearAgain(const KnownHost& host) {
  return Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
    bool all = true;
    for (const int place : host.last) all = coordinator.HearAgain(host.heartbeats.at(place).heard, now) && all;
    return all;
  });
}

void CoordinatorService::EndCall(const KnownHost& host) {
  Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
    coordinator.EndCall(host.call, now);
    return true;
  });
}

// Of places that were checked.
void CoordinatorService::HearEach(const v1::HostHeartbeats& request, KnownHost& host,
                                  v1::HostHeartbeatReplies& replies) {
  std::map<int, KnownHeartbeat>& known = host.heartbeats;
  const int count = request.workers_size();
  struct Heard {
    bool same = false;
    absl::StatusOr<std::vector<Assignment>> told = std::vector<Assignment>();
    std::optional<shardmesh::Coordinator::Heard> may_repeat;
  };
  std::vector<Heard> heard(count);
  for (int i = 0; i < count; ++i) {
    if (const absl::Status valid = CheckHeartbeat(request.workers(i), known); !valid.ok()) heard[i].told = valid;
  }
  const auto heartbeat = [&](int i) -> const v1::HeartbeatRequest& {
    const v1::HostHeartbeats::Worker& worker = request.workers(i);
    return worker.has_heartbeat() ? worker.heartbeat() : known.at(worker.place()).request;
  };
  heard = Locked([&, heard = std::move(heard)](shardmesh::Coordinator& coordinator, absl::Time now) mutable {
    for (int i = 0; i < count; ++i) {
      if (!heard[i].told.ok()) continue;
      const v1::HeartbeatRequest& q = heartbeat(i);
      if (!request.workers(i).has_heartbeat()) {
        heard[i].same = coordinator.HearAgain(known.at(request.workers(i).place()).heard, now);
        if (heard[i].same) continue;
      }
      heard[i].told = Hear(coordinator, now, q);
      if (!heard[i].told.ok()) continue;
      coordinator.HearInCall(q.name(), host.call);  // the first of a call is always whole
      heard[i].may_repeat = coordinator.MayRepeat(q.name(), ReportsFromProto(q), *heard[i].told);
    }
    return std::move(heard);
  });
  size_t bytes = 0;
  host.takes_again = count > 0;
  host.may_skip = count > 0;
  for (int i = 0; i < count; ++i) {
    const int place = request.workers(i).place();
    v1::HostHeartbeatReplies::Answer& answer = *replies.add_answers();
    absl::Status status = heard[i].told.status();
    answer.set_same(heard[i].same);
    if (heard[i].same) {
      answer.set_kept(true);
    } else if (status.ok() && bytes > kMaxReplyBytes) {
      status =
          absl::ResourceExhaustedError("the reply to the host's other workers is large; send this heartbeat alone");
    } else if (status.ok()) {
      *answer.mutable_reply() = AnswerTo(heartbeat(i), *heard[i].told);
      bytes += answer.ByteSizeLong();
      answer.set_kept(heard[i].may_repeat.has_value() && heartbeat(i).ByteSizeLong() <= kMaxKeptBytes);
    }
    if (!status.ok()) {
      answer.set_code(static_cast<int>(status.code()));
      answer.set_message(std::string(status.message()));
      answer.set_next_incarnation(NextIncarnationOf(status).value_or(0));
    }
    if (!answer.kept()) {
      known.erase(place);
    } else if (!answer.same()) {
      known[place] = KnownHeartbeat{v1::HeartbeatRequest(heartbeat(i)), *heard[i].may_repeat};
    }
    host.takes_again = host.takes_again && answer.kept();
    host.may_skip = host.may_skip && answer.kept() && known.at(place).heard.holds_jobs;
  }
  host.may_skip = host.may_skip && host.takes_again;
}

grpc::ServerUnaryReactor* CoordinatorService::Leave(grpc::CallbackServerContext* context,
                                                    const v1::LeaveRequest* request, v1::LeaveReply* reply) {
  return Unary(context, request, reply, [&](const v1::LeaveRequest& q, v1::LeaveReply*) -> absl::Status {
    RETURN_IF_ERROR(Validate(q));
    LogCaller("Leave", q.name(), *context);
    return LogRefusal("Leave", q.name(), *context,
                      Locked([&](shardmesh::Coordinator& coordinator, absl::Time now) {
                        return coordinator.Leave(q.name(), q.incarnation(), now, q.secret());
                      }));
  });
}

}  // namespace shardmesh
