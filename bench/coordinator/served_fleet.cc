#include "bench/coordinator/served_fleet.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "rpc/base/deadline.h"
#include "rpc/base/main_support.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "server/service/coordinator_service.h"
#include "server/service/hosts_service.h"

namespace shardmesh::bench {
namespace {

constexpr int kConnections = 4;
constexpr absl::Duration kPatience = absl::Minutes(10), kTick = absl::Milliseconds(375);

// The monotonic time, as the state machine's fleet counts it: it starts where that stands.
class ShiftedClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::UnixEpoch() + absl::Hours(24 * 365) + (MonotonicNow() - start_); }

 private:
  const absl::Time start_ = MonotonicNow();
};

}  // namespace

absl::Status ServeFleet(const FleetOptions& options) {
  RETURN_IF_ERROR(PrepareProcess({"error"}));
  ASSIGN_OR_RETURN(const auto fleet, Fleet::Make(options));
  RETURN_IF_ERROR(fleet->Join().status());
  RETURN_IF_ERROR(fleet->CreateJobs().status());
  const ShiftedClock clock;
  CoordinatorService service({}, fleet->Release(), clock);
  HostsService hosts(service);
  ServerOptions server_options;
  server_options.measures_bandwidth = false;  // as the coordinator has it
  server_options.max_connections = options.ranks / kRanksPerHost + 64;
  ASSIGN_OR_RETURN(const std::unique_ptr<Server> server, Server::Start(server_options, {&service, &hosts}));
  std::printf("%s\n", server->address().c_str());
  std::fflush(stdout);
  pollfd input{STDIN_FILENO, POLLIN, 0};
  while (poll(&input, 1, static_cast<int>(absl::ToInt64Milliseconds(kTick))) == 0) RETURN_IF_ERROR(service.Tick());
  hosts.End();
  server->Drain(absl::ZeroDuration());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ServedFleet>> ServedFleet::Start(const FleetOptions& options) {
  std::unique_ptr<ServedFleet> fleet(new ServedFleet(options));
  ASSIGN_OR_RETURN(fleet->process_,
                   Process::Start({ProgramPath("bench/coordinator/coordinator"), "--serve", absl::StrCat(options.ranks),
                                   "--serve-jobs", absl::StrCat(options.ranks_per_job), "--state", options.state},
                                  Process::kEveryCore));
  RETURN_IF_ERROR(fleet->Connect());
  RETURN_IF_ERROR(fleet->Describe(v1::JOB_STATE_PREPARING));
  return fleet;
}

absl::Status ServedFleet::Connect() {
  ASSIGN_OR_RETURN(address_, process_->ReadLine(kPatience));
  for (int i = 0; i < kConnections; ++i) {
    ASSIGN_OR_RETURN(auto channel, NewChannel(address_));
    stubs_.push_back(v1::Coordinator::NewStub(channel));
  }
  return absl::OkStatus();
}

absl::Status ServedFleet::Describe(v1::JobState state) {
  std::unordered_map<std::string, int> numbers;
  for (int i = 0; i < options_.ranks; ++i) numbers[FleetWorker(i).name] = i;
  held_.resize(options_.ranks);
  for (int job = 0; job < options_.ranks / options_.ranks_per_job; ++job) {
    v1::DescribeJobRequest request;
    request.set_job(absl::StrCat("job", job));
    v1::JobDescription view;
    grpc::ClientContext context;
    context.set_deadline(DeadlineIn(kPatience));
    RETURN_IF_ERROR(FromGrpc(stubs_[0]->DescribeJob(&context, request, &view), "coordinator"));
    if (view.state() != state || view.members_size() != options_.ranks_per_job) {
      return absl::InternalError(absl::StrCat("job ", request.job(), " is ", v1::JobState_Name(view.state()), " with ",
                                              view.members_size(), " members, not ", v1::JobState_Name(state)));
    }
    for (const v1::Member& member : view.members()) {
      v1::MemberStatus& held = held_[numbers.at(member.worker())];
      held.set_job(request.job());
      held.set_epoch(view.epoch());
      held.set_rank(member.rank());
      held.set_plan_hash(view.plan_hash());
    }
  }
  return absl::OkStatus();
}

namespace {
std::string NameAt(const v1::Assignment& told, int rank) {
  for (const v1::Peer& peer : told.peers()) {
    if (peer.rank() == rank) return peer.worker();
  }
  return "";
}
}  // namespace

absl::Status ServedFleet::Check(int worker, const v1::HeartbeatReply& reply, bool whole) {
  const std::string name = FleetWorker(worker).name;
  const v1::MemberStatus& held = held_[worker];
  if (reply.assignments_size() != 1) {
    return absl::InternalError(absl::StrCat(name, " has ", reply.assignments_size(), " assignments, not one"));
  }
  const v1::Assignment& told = reply.assignments(0);
  const bool same = told.epoch() == held.epoch() && told.rank() == held.rank() && told.spec().name() == held.job();
  if (same && (!whole || NameAt(told, held.rank()) == name)) {
    if (whole) assignment_bytes_ = static_cast<int64_t>(told.ByteSizeLong());
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(name, " is told to be rank ", told.rank(), " of job ", told.spec().name(),
                                          " at epoch ", told.epoch(), "; it is rank ", held.rank(), " of ",
                                          held.job()));
}

v1::HeartbeatRequest ServedFleet::HeartbeatOf(int worker, v1::MemberState state) const {
  const WorkerIdentity identity = FleetWorker(worker);
  v1::HeartbeatRequest request;
  request.set_name(identity.name);
  request.set_incarnation(identity.incarnation);
  request.set_spans_hosts(true);
  request.set_retained(true);
  if (state != v1::MEMBER_STATE_UNSPECIFIED) {
    v1::MemberStatus* status = request.add_jobs();
    *status = held_[worker];
    status->set_state(state);
    status->set_committed_step(status->rank() == 0 ? step_ - 1 : -1);
  }
  return request;
}

absl::Status ServedFleet::CallShare(int connection, int stride, v1::MemberState state) {
  const bool whole = state == v1::MEMBER_STATE_UNSPECIFIED;
  for (int worker = connection * stride; worker < options_.ranks; worker += kConnections * stride) {
    const v1::HeartbeatRequest request = HeartbeatOf(worker, state);
    v1::HeartbeatReply reply;
    grpc::ClientContext context;
    context.set_deadline(DeadlineIn(kPatience));
    RETURN_IF_ERROR(FromGrpc(stubs_[connection]->Heartbeat(&context, request, &reply), "coordinator"));
    RETURN_IF_ERROR(Check(worker, reply, whole));
  }
  return absl::OkStatus();
}

absl::Status ServedFleet::OpenHosts() {
  for (int host = 0; host < options_.ranks / kRanksPerHost; ++host) {
    auto call = std::make_unique<HostCall>();
    ChannelOptions as_node;
    as_node.measures_bandwidth = false;
    ASSIGN_OR_RETURN(auto channel, NewChannel(address_, {}, as_node));
    call->stub = v1::Hosts::NewStub(channel);
    call->context.set_deadline(DeadlineIn(kPatience));
    call->stream = call->stub->Heartbeats(&call->context);
    hosts_.push_back(std::move(call));
  }
  return absl::OkStatus();
}

// Without a word of who has nothing to say.
v1::HostHeartbeats ServedFleet::MessageOf(int host) {
  v1::HostHeartbeats message;
  for (int i = 0; i < kRanksPerHost; ++i) {
    const int worker = host * kRanksPerHost + i;
    v1::HostHeartbeats::Worker* const one = message.add_workers();
    one->set_place(i);
    // The others' heartbeats say nothing of steps, so they are the same.
    if (step_ != hosts_[host]->sent && (held_[worker].rank() == 0 || hosts_[host]->sent < 0)) {
      *one->mutable_heartbeat() = HeartbeatOf(worker, v1::MEMBER_STATE_READY);
    }
  }
  hosts_[host]->sent = step_;
  return message;
}

absl::Status ServedFleet::HostsShare(int first, bool skips) {
  const int hosts = static_cast<int>(hosts_.size());
  for (int host = first; host < hosts; host += kConnections) {
    HostCall& call = *hosts_[host];
    v1::HostHeartbeats message = MessageOf(host);
    // As a node sends it: in one word where nothing is new.
    bool news = !call.takes_again;
    for (const v1::HostHeartbeats::Worker& worker : message.workers()) news = news || worker.has_heartbeat();
    call.skipped = skips && !news && call.may_skip && !call.skipped;
    call.skips += call.skipped ? 1 : 0;
    if (call.skipped) continue;
    if (!news) {
      message.Clear();
      message.set_again(true);
    }
    if (!call.stream->Write(message)) return FromGrpc(call.stream->Finish(), "coordinator");
  }
  for (int host = first; host < hosts; host += kConnections) {
    if (hosts_[host]->skipped) continue;
    v1::HostHeartbeatReplies replies;
    if (!hosts_[host]->stream->Read(&replies)) return FromGrpc(hosts_[host]->stream->Finish(), "coordinator");
    hosts_[host]->takes_again = replies.takes_again();
    hosts_[host]->may_skip = replies.skip_within_ms() > 0;
    if (replies.same()) continue;
    if (replies.answers_size() != kRanksPerHost) {
      return absl::InternalError(
          absl::StrCat("host ", host, " has ", replies.answers_size(), " answers, not ", kRanksPerHost));
    }
    for (int i = 0; i < kRanksPerHost; ++i) {
      const v1::HostHeartbeatReplies::Answer& answer = replies.answers(i);
      if (answer.code() != 0) return absl::InternalError(answer.message());
      if (!answer.same()) {
        RETURN_IF_ERROR(Check(host * kRanksPerHost + i, answer.reply(), /*whole=*/false));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Cost> ServedFleet::BeatByHost(int rounds, bool skips) {
  if (hosts_.empty()) {
    RETURN_IF_ERROR(OpenHosts());
    RETURN_IF_ERROR(OnAll(1, [this](int i) { return HostsShare(i, /*skips=*/false); }).status());
  }
  const auto skipped = [this] {
    int64_t count = 0;
    for (const auto& host : hosts_) count += host->skips;
    return count;
  };
  const int64_t before = skipped();
  Cost all;
  rounds *= 2;
  for (int round = 0; round < rounds; ++round) {
    ++step_;  // rank 0 of each job has something to say
    ASSIGN_OR_RETURN(const Cost cost, OnAll(1, [this, skips](int i) { return HostsShare(i, skips); }));
    all.elapsed += cost.elapsed / rounds;
    all.processor += cost.processor / rounds;
  }
  all.calls = options_.ranks;
  const int64_t quiet = static_cast<int64_t>(hosts_.size()) - options_.ranks / options_.ranks_per_job;
  if (skips && skipped() - before < quiet * rounds / 2) {
    return absl::InternalError(absl::StrCat(skipped() - before, " messages were left out in ", rounds, " rounds of ",
                                            hosts_.size(), " hosts, not every second one"));
  }
  return all;
}

// Of one round.
absl::StatusOr<Cost> ServedFleet::OnAll(int rounds, const std::function<absl::Status(int connection)>& share) {
  const double start = MonotonicSeconds(), processor = process_->ProcessorSeconds();
  std::vector<absl::Status> results(kConnections);
  std::vector<std::thread> threads;
  for (int i = 0; i < kConnections; ++i) {
    threads.emplace_back([i, rounds, &share, &results] {
      for (int round = 0; round < rounds && results[i].ok(); ++round) results[i] = share(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return Cost{(MonotonicSeconds() - start) / rounds, (process_->ProcessorSeconds() - processor) / rounds, 0};
}

absl::StatusOr<Cost> ServedFleet::CallAll(int stride, v1::MemberState state, int rounds) {
  ASSIGN_OR_RETURN(Cost cost, OnAll(rounds, [=](int i) { return CallShare(i, stride, state); }));
  cost.calls = (options_.ranks + stride - 1) / stride;
  const double scale = static_cast<double>(options_.ranks) / cost.calls;
  cost.elapsed *= scale;
  cost.processor *= scale;
  return cost;
}

absl::StatusOr<Cost> ServedFleet::TakeAssignments(int ranks) {
  return CallAll(std::max(1, options_.ranks / ranks), v1::MEMBER_STATE_UNSPECIFIED, 1);
}

absl::StatusOr<Cost> ServedFleet::ReportReady() {
  ASSIGN_OR_RETURN(const Cost cost, CallAll(1, v1::MEMBER_STATE_READY, 1));
  RETURN_IF_ERROR(Describe(v1::JOB_STATE_READY));
  return cost;
}

absl::StatusOr<Cost> ServedFleet::Beat(int rounds) {
  ++step_;
  return CallAll(1, v1::MEMBER_STATE_READY, rounds);
}

}  // namespace shardmesh::bench
