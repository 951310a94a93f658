// The coordinator through gRPC: good calls, and every bad input with its typed answer.
#include "server/service/coordinator_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "proto/convert.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "server/coordinator/testing/small_jobs.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

class CoordinatorServiceTest : public ::testing::Test {
 protected:
  CoordinatorServiceTest() {
    service_ = std::make_unique<CoordinatorService>(
        CoordinatorServiceOptions(), shardmesh::Coordinator::Create({}, NewMemoryStore(), clock_.Now()).value(),
        clock_);
    server_ = Server::Start(ServerOptions(), {service_.get()}).value();
    stub_ = v1::Coordinator::NewStub(NewChannel(server_->address()).value());
  }
  ~CoordinatorServiceTest() override { server_->Drain(absl::ZeroDuration()); }

  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Call(grpc::Status (v1::Coordinator::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                           Reply*),
                             const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    Reply reply;
    const grpc::Status status = (stub_.get()->*method)(&context, request, &reply);
    if (!status.ok()) return FromGrpc(status, "coordinator");
    return reply;
  }
  absl::StatusOr<v1::CreateJobReply> Create(const JobSpec& spec) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = ToProto(spec);
    return Call(&v1::Coordinator::Stub::CreateJob, request);
  }
  absl::StatusOr<v1::JobDescription> Describe(const std::string& job) {
    v1::DescribeJobRequest request;
    request.set_job(job);
    return Call(&v1::Coordinator::Stub::DescribeJob, request);
  }
  static v1::JoinRequest JoinRequestOf(const std::string& name, int64_t incarnation) {
    v1::JoinRequest request;
    request.set_name(name);
    request.set_incarnation(incarnation);
    request.set_address("localhost:1");
    request.set_host_id("h1");
    request.set_local_socket("/run/s");
    request.set_pid(7);
    return request;
  }
  absl::StatusOr<v1::JoinReply> Join(const std::string& name, int64_t incarnation = 1) {
    return Call(&v1::Coordinator::Stub::Join, JoinRequestOf(name, incarnation));
  }
  // A heartbeat that reports all that the worker was told, as ready.
  absl::StatusOr<v1::HeartbeatReply> Beat(const std::string& name, const v1::HeartbeatReply& told = {},
                                          const std::string& other_hash = "") {
    v1::HeartbeatRequest request;
    request.set_name(name);
    request.set_incarnation(1);
    for (const v1::Assignment& assignment : told.assignments()) {
      v1::MemberStatus* status = request.add_jobs();
      status->set_job(assignment.spec().name());
      status->set_epoch(assignment.epoch());
      status->set_rank(assignment.rank());
      status->set_state(v1::MEMBER_STATE_READY);
      status->set_plan_hash(other_hash.empty() ? assignment.plan_hash() : other_hash);
      status->set_committed_step(4);
      status->add_published_steps(4);
    }
    return Call(&v1::Coordinator::Stub::Heartbeat, request);
  }

  ManualClock clock_;
  std::unique_ptr<CoordinatorService> service_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
};

TEST_F(CoordinatorServiceTest, JobThatReforms_SaysWhereItsWeightsAre) {
  for (const char* worker : {"a", "b", "c"}) ASSERT_OK(Join(worker));
  ASSERT_OK(Create(SmallMeshSpec("j", "ddp=3")));
  for (const char* worker : {"a", "b", "c"}) {
    ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply told, Beat(worker));
    EXPECT_FALSE(told.assignments(0).has_from());
    ASSERT_OK(Beat(worker, told));
  }
  ASSERT_EQ(Describe("j")->state(), v1::JOB_STATE_READY);
  v1::LeaveRequest leave;
  leave.set_name("b");
  leave.set_incarnation(1);
  ASSERT_OK(Call(&v1::Coordinator::Stub::Leave, leave));
  EXPECT_EQ(Describe("j")->spec().mesh(0).size(), 2);
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply to_a, Beat("a"));
  const v1::Origin& from = to_a.assignments(0).from();
  EXPECT_EQ(from.epoch(), 1);
  EXPECT_EQ(from.mesh(), "ddp=3");
  EXPECT_EQ(std::vector<int>(from.was().begin(), from.was().end()), (std::vector<int>{0, 2}));
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply known, Beat("a", to_a));
  EXPECT_EQ(known.assignments(0).spec().mesh_size(), 0) << "it knows the rest";
  EXPECT_EQ(known.assignments(0).from().epoch(), 1);
  EXPECT_EQ(known.assignments(0).from().was_size(), 0);
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply ready, Beat("c", *Beat("c")));
  EXPECT_FALSE(ready.assignments(0).has_from());
}

// A service with room for four jobs; each caller is who `caller_` says.
class CoordinatorRoomTest : public CoordinatorServiceTest {
 protected:
  CoordinatorRoomTest() {
    server_->Drain(absl::ZeroDuration());
    CoordinatorOptions machine;
    machine.max_jobs = 4;
    CoordinatorServiceOptions options;
    options.max_jobs = machine.max_jobs;
    options.max_spec_bytes = 2000;
    options.caller_key = [this](const grpc::ServerContextBase&) { return caller_; };
    server_.reset();
    service_ = std::make_unique<CoordinatorService>(
        options, shardmesh::Coordinator::Create(machine, NewMemoryStore(), clock_.Now()).value(), clock_);
    server_ = Server::Start(ServerOptions(), {service_.get()}).value();
    stub_ = v1::Coordinator::NewStub(NewChannel(server_->address()).value());
  }
  absl::Status Delete(const std::string& job) {
    v1::DeleteJobRequest remove;
    remove.set_job(job);
    return Call(&v1::Coordinator::Stub::DeleteJob, remove).status();
  }
  std::string caller_;
};

TEST_F(CoordinatorRoomTest, OneCaller_DoesNotGetTheLastOfIt_AndADeletedJobGivesItBack) {
  caller_ = "CN=b";
  ASSERT_OK(Create(SmallSpec("theirs", 1)));
  caller_ = "CN=a";
  for (const char* name : {"j1", "j2", "j3"}) ASSERT_OK(Create(SmallSpec(name, 1)));
  EXPECT_THAT(Create(SmallSpec("j4", 1)),
              StatusIs(Code::kResourceExhausted, HasSubstr("caller \"CN=a\" has 3 of 4 jobs")));
  EXPECT_FALSE(Create(SmallSpec("j1", 1))->created()) << "it is there";
  caller_ = "CN=c";
  EXPECT_THAT(Create(SmallSpec("j4", 1)), StatusIs(Code::kResourceExhausted, HasSubstr("there are 4 jobs, at most 4")));
  ASSERT_OK(Delete("j1"));
  caller_ = "CN=a";
  EXPECT_OK(Create(SmallSpec("j4", 1)));
}

TEST_F(CoordinatorRoomTest, Specifications_AreBounded_InAll) {
  JobSpec large = SmallSpec("large", 1);
  large.parameters[0].name = std::string(1500, 'x');
  ASSERT_OK(Create(large));
  large.name = "other";
  EXPECT_THAT(Create(large), StatusIs(Code::kResourceExhausted, HasSubstr("of at most 2000; delete jobs first")));
  EXPECT_OK(Create(SmallSpec("small", 1)));
  ASSERT_OK(Delete("large"));
  EXPECT_OK(Create(large));
}

TEST_F(CoordinatorServiceTest, AJobsSpan) {
  ASSERT_OK_AND_ASSIGN(const v1::JoinReply joined, Join("a"));
  EXPECT_EQ(joined.heartbeat_interval_ms(), 500);
  EXPECT_EQ(joined.heartbeat_timeout_ms(), 3000);
  ASSERT_OK_AND_ASSIGN(const v1::CreateJobReply created, Create(SmallSpec("j", 1)));
  EXPECT_TRUE(created.created());
  EXPECT_EQ(created.job().state(), v1::JOB_STATE_PREPARING);
  EXPECT_FALSE(Create(SmallSpec("j", 1))->created());
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply told, Beat("a"));
  ASSERT_EQ(told.assignments_size(), 1);
  EXPECT_EQ(told.assignments(0).plan_hash(), created.job().plan_hash());
  EXPECT_EQ(told.assignments(0).peers(0).local_socket(), "/run/s");
  ASSERT_OK(Beat("a", told));
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription ready, Describe("j"));
  EXPECT_EQ(ready.state(), v1::JOB_STATE_READY);
  EXPECT_EQ(ready.members(0).worker(), "a");
  EXPECT_TRUE(ready.members(0).alive() && ready.members(0).ready());
  EXPECT_EQ(ready.spec().parameters_size(), 2);

  v1::ListVersionsRequest versions;
  versions.set_job("j");
  ASSERT_OK_AND_ASSIGN(const v1::ListVersionsReply steps, Call(&v1::Coordinator::Stub::ListVersions, versions));
  EXPECT_EQ(steps.committed_step(), 4);
  EXPECT_EQ(steps.published_steps(0), 4);
  v1::GetPlanRequest get_plan;
  get_plan.set_job("j");
  ASSERT_OK_AND_ASSIGN(const v1::GetPlanReply plan, Call(&v1::Coordinator::Stub::GetPlan, get_plan));
  EXPECT_EQ(plan.hash(), created.job().plan_hash());
  EXPECT_EQ(plan.placements_size(), 2);
  EXPECT_EQ(plan.placements(1).name(), "b.w");
  v1::ResolveNamesRequest resolve;
  resolve.set_job("j");
  resolve.add_raw_names("_orig_mod.b.w");
  ASSERT_OK_AND_ASSIGN(const v1::ResolveNamesReply names, Call(&v1::Coordinator::Stub::ResolveNames, resolve));
  EXPECT_EQ(names.names(0).canonical(), "b.w");
  EXPECT_EQ(names.names(0).tensor(), 1);
  ASSERT_OK_AND_ASSIGN(const v1::ListJobsReply list, Call(&v1::Coordinator::Stub::ListJobs, v1::ListJobsRequest()));
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_EQ(list.jobs(0).spec().parameters_size(), 0);
  EXPECT_EQ(list.jobs(0).plan_hash(), plan.hash());

  v1::LeaveRequest leave;
  leave.set_name("a");
  leave.set_incarnation(1);
  ASSERT_OK(Call(&v1::Coordinator::Stub::Leave, leave));
  EXPECT_THAT(Describe("j")->error(), HasSubstr("worker a (rank 0, pid 7) left"));
  v1::DeleteJobRequest remove;
  remove.set_job("j");
  ASSERT_OK(Call(&v1::Coordinator::Stub::DeleteJob, remove));
  EXPECT_THAT(Describe("j"), StatusIs(Code::kNotFound, HasSubstr("there are no jobs")));
}

TEST_F(CoordinatorServiceTest, Tick_TheSilentLoseTheirJobs) {
  ASSERT_OK(Join("a"));
  ASSERT_OK(Create(SmallSpec("j", 1)));
  for (int i = 0; i < 4; ++i) {
    clock_.Advance(absl::Seconds(1));
    ASSERT_OK(service_->Tick());
  }
  EXPECT_EQ(Describe("j")->state(), v1::JOB_STATE_WAITING);
}

TEST_F(CoordinatorServiceTest, NoDeadline_Refused) {
  grpc::ClientContext context;
  v1::ListJobsReply reply;
  EXPECT_THAT(FromGrpc(stub_->ListJobs(&context, {}, &reply), "c"),
              StatusIs(Code::kInvalidArgument, HasSubstr("deadline")));
}

TEST_F(CoordinatorServiceTest, UnknownJob_ListsTheKnown) {
  ASSERT_OK(Create(SmallSpec("known", 1)));
  EXPECT_THAT(Describe("x"), StatusIs(Code::kNotFound, HasSubstr("no job x; there are: known")));
  EXPECT_THAT(Describe("x/y"), StatusIs(Code::kInvalidArgument, HasSubstr("\"x/y\"")));
}

TEST_F(CoordinatorServiceTest, UnknownName_SaysTheNearest) {
  ASSERT_OK(Create(SmallSpec("j", 1)));
  v1::ResolveNamesRequest request;
  request.set_job("j");
  request.add_raw_names("_orig_mod.a.v");
  EXPECT_THAT(Call(&v1::Coordinator::Stub::ResolveNames, request),
              StatusIs(Code::kNotFound, AllOf(HasSubstr("_orig_mod.a.v"), HasSubstr("did you mean \"a.w\""))));
}

TEST_F(CoordinatorServiceTest, UnknownFormat_NamesParameterAndValue) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = ToProto(SmallSpec("j", 1));
  request.mutable_spec()->mutable_parameters(1)->set_format(static_cast<v1::Format>(42));
  EXPECT_THAT(
      Call(&v1::Coordinator::Stub::CreateJob, request),
      StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("parameter 1 \"b.w\": format is 42"), HasSubstr("bf16_sr"))));
  EXPECT_THAT(Call(&v1::Coordinator::Stub::CreateJob, v1::CreateJobRequest()),
              StatusIs(Code::kInvalidArgument, HasSubstr("spec is unset")));
}

TEST_F(CoordinatorServiceTest, NoMesh_NoDefault_Refused) {
  JobSpec spec = SmallSpec("j", 1);
  spec.mesh.dims.clear();
  EXPECT_THAT(Create(spec), StatusIs(Code::kInvalidArgument, HasSubstr("no default mesh")));
}

TEST_F(CoordinatorServiceTest, SameNameOtherParameters_NamesTheFirstDifference) {
  ASSERT_OK(Create(SmallSpec("j", 1)));
  JobSpec spec = SmallSpec("j", 1);
  spec.parameters[1].shape = {8};
  EXPECT_THAT(Create(spec), StatusIs(Code::kAlreadyExists,
                                     AllOf(HasSubstr("parameter 1 \"b.w\""), HasSubstr("[7] there, [8] here"))));
}

TEST_F(CoordinatorServiceTest, SameJobUnderOtherNames_IsTheSame_WithTheFirstNames) {
  JobSpec wrapped = SmallSpec("j", 1);
  for (ParameterSpec& parameter : wrapped.parameters) parameter.name = "_orig_mod." + parameter.name;
  ASSERT_OK(Create(wrapped));
  EXPECT_OK(Create(SmallSpec("j", 1)));
  v1::DescribeJobRequest request;
  request.set_job("j");
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription job, Call(&v1::Coordinator::Stub::DescribeJob, request));
  EXPECT_EQ(job.spec().parameters(0).name(), SmallSpec("j", 1).parameters[0].name);
  EXPECT_EQ(job.spec().parameters(0).given(), wrapped.parameters[0].name);
  v1::CreateJobRequest hostile;
  *hostile.mutable_spec() = ToProto(SmallSpec("k", 1));
  hostile.mutable_spec()->mutable_parameters(0)->set_given(std::string(kMaxNameBytes + 1, 'x'));
  EXPECT_THAT(Call(&v1::Coordinator::Stub::CreateJob, hostile),
              StatusIs(Code::kInvalidArgument, HasSubstr("given of parameter 0")));
}

TEST_F(CoordinatorServiceTest, JobThatGoesBack_SaysToWhichCheckpoint) {
  for (const char* worker : {"a", "b", "c"}) ASSERT_OK(Join(worker));
  JobSpec spec = SmallMeshSpec("j", "fsdp=2");
  spec.on_loss = OnLoss::kCheckpoint;
  ASSERT_OK(Create(spec));
  for (const char* worker : {"a", "b"}) {
    ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply told, Beat(worker));
    EXPECT_FALSE(told.assignments(0).has_back());
    ASSERT_OK(Beat(worker, told));
  }
  ASSERT_EQ(Describe("j")->state(), v1::JOB_STATE_READY);
  EXPECT_FALSE(Describe("j")->has_gone_back());
  v1::RecordCheckpointRequest record;
  record.set_job("j");
  record.set_uid(Describe("j")->uid());
  record.set_epoch(1);
  record.mutable_checkpoint()->set_folder("/data/step-3");
  record.mutable_checkpoint()->set_step(3);
  record.mutable_checkpoint()->set_digest(~uint64_t{0});
  ASSERT_OK(Call(&v1::Coordinator::Stub::RecordCheckpoint, record));
  record.set_uid(record.uid() ^ 1);
  EXPECT_THAT(Call(&v1::Coordinator::Stub::RecordCheckpoint, record).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("has uid")));
  record.clear_checkpoint();
  EXPECT_THAT(Call(&v1::Coordinator::Stub::RecordCheckpoint, record).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("checkpoint is unset")));
  ASSERT_EQ(Describe("j")->checkpoints_size(), 1);
  EXPECT_EQ(Describe("j")->checkpoints(0).digest(), ~uint64_t{0});

  v1::LeaveRequest leave;
  leave.set_name("b");
  leave.set_incarnation(1);
  ASSERT_OK(Call(&v1::Coordinator::Stub::Leave, leave));
  EXPECT_EQ(Describe("j")->gone_back().epoch(), 0);
  EXPECT_EQ(Describe("j")->gone_back().lost_step(), 4);
  EXPECT_THAT(Describe("j")->gone_back().cause(), HasSubstr("worker b (rank 1"));
  const auto loaded = [&](const std::string& worker, int rank, uint64_t digest) {
    v1::HeartbeatRequest request;
    request.set_name(worker);
    request.set_incarnation(1);
    v1::MemberStatus* const status = request.add_jobs();
    status->set_job("j");
    status->set_epoch(2);
    status->set_rank(rank);
    status->set_state(v1::MEMBER_STATE_PREPARING);
    status->set_committed_step(-1);
    status->set_loaded_digest(digest);
    return Call(&v1::Coordinator::Stub::Heartbeat, request);
  };
  for (const char* worker : {"a", "c"}) {
    ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply told, Beat(worker));
    EXPECT_EQ(told.assignments(0).back().checkpoint().folder(), "/data/step-3");
    EXPECT_FALSE(told.assignments(0).back().use());
    ASSERT_OK(loaded(worker, told.assignments(0).rank(), told.assignments(0).rank() == 0 ? 1 : ~uint64_t{0} - 1));
  }
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply use, loaded("a", 0, 1));
  EXPECT_TRUE(use.assignments(0).back().use());
  EXPECT_FALSE(use.assignments(0).back().has_checkpoint()) << "it knows it";
}

TEST_F(CoordinatorServiceTest, StaleIncarnation_Aborted) {
  ASSERT_OK(Join("a", 5));
  EXPECT_THAT(Join("a", 4), StatusIs(Code::kAborted, AllOf(HasSubstr("incarnation 4"), HasSubstr("5"))));
  EXPECT_THAT(Beat("a"), StatusIs(Code::kAborted, HasSubstr("incarnation 1")));
  EXPECT_THAT(Join("a", 6), StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 5")));
  v1::JoinRequest found_dead = JoinRequestOf("a", 6);
  found_dead.set_dead_incarnation(5);
  EXPECT_OK(Call(&v1::Coordinator::Stub::Join, found_dead));
  EXPECT_THAT(Beat("b"), StatusIs(Code::kNotFound, HasSubstr("worker b has not joined")));
}

TEST_F(CoordinatorServiceTest, NextIncarnation_TakesOverAndIsToldAllOfItsJobs) {
  ASSERT_OK(Join("a"));
  ASSERT_OK(Join("b"));
  ASSERT_OK(Create(SmallSpec("j", 2)));
  ASSERT_OK(Create(SmallSpec("lost", 2)));
  for (const char* worker : {"a", "b"}) ASSERT_OK(Beat(worker, *Beat(worker)));
  v1::JoinRequest join = JoinRequestOf("b", 2);
  join.set_resumes(1);
  v1::ResumedJob* const resumed = join.add_resumed();
  resumed->set_job("j");
  resumed->set_epoch(1);
  resumed->set_rank(1);
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply held, Beat("b"));
  for (const v1::Assignment& assignment : held.assignments()) {
    if (assignment.spec().name() == "j") resumed->set_secret(assignment.secret());
  }
  ASSERT_OK(Call(&v1::Coordinator::Stub::Join, join));
  EXPECT_EQ(Describe("lost")->state(), v1::JOB_STATE_FAILED);
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription job, Describe("j"));
  EXPECT_EQ(job.state(), v1::JOB_STATE_READY);
  EXPECT_EQ(job.members(1).incarnation(), 2);
  EXPECT_TRUE(job.members(1).alive() && job.members(1).ready());
  EXPECT_THAT(Beat("b"), StatusIs(Code::kAborted, HasSubstr("incarnation 1 of worker b is stale")));

  v1::HeartbeatRequest beat;
  beat.set_name("b");
  beat.set_incarnation(2);
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply told, Call(&v1::Coordinator::Stub::Heartbeat, beat));
  ASSERT_EQ(told.assignments_size(), 1);
  EXPECT_EQ(told.assignments(0).epoch(), 1);
  EXPECT_EQ(told.assignments(0).rank(), 1);
  EXPECT_EQ(told.assignments(0).plan_hash(), job.plan_hash());
  EXPECT_EQ(told.assignments(0).spec().parameters_size(), 2);
  ASSERT_EQ(told.assignments(0).peers_size(), 2);
  EXPECT_EQ(told.assignments(0).peers(0).incarnation(), 1);
  EXPECT_EQ(told.assignments(0).peers(1).incarnation(), 2);
  join.set_resumes(2);
  EXPECT_THAT(Call(&v1::Coordinator::Stub::Join, join), StatusIs(Code::kInvalidArgument, HasSubstr("resumes is 2")));
}

TEST_F(CoordinatorServiceTest, CallsOfAnIncarnationWithoutItsSecret_PermissionDenied) {
  v1::JoinRequest join = JoinRequestOf("a", 1);
  join.set_secret("of-a");
  ASSERT_OK(Call(&v1::Coordinator::Stub::Join, join));
  ASSERT_OK(Create(SmallSpec("j", 1)));
  v1::HeartbeatRequest beat;
  beat.set_name("a");
  beat.set_incarnation(1);
  v1::LeaveRequest leave;
  leave.set_name("a");
  leave.set_incarnation(1);
  for (const char* const secret : {"", "guessed"}) {
    join.set_secret(secret);
    beat.set_secret(secret);
    leave.set_secret(secret);
    EXPECT_THAT(Call(&v1::Coordinator::Stub::Join, join), StatusIs(Code::kPermissionDenied, HasSubstr("join of")));
    EXPECT_THAT(
        Call(&v1::Coordinator::Stub::Heartbeat, beat),
        StatusIs(Code::kPermissionDenied, HasSubstr("heartbeat of worker a incarnation 1 without the secret")));
    EXPECT_THAT(Call(&v1::Coordinator::Stub::Leave, leave), StatusIs(Code::kPermissionDenied, HasSubstr("leave of")));
  }
  EXPECT_EQ(Describe("j")->state(), v1::JOB_STATE_PREPARING);
  beat.set_secret("of-a");
  leave.set_secret("of-a");
  EXPECT_OK(Call(&v1::Coordinator::Stub::Heartbeat, beat));
  EXPECT_OK(Call(&v1::Coordinator::Stub::Leave, leave));
  beat.set_secret(std::string(65, 's'));
  EXPECT_THAT(Call(&v1::Coordinator::Stub::Heartbeat, beat), StatusIs(Code::kInvalidArgument, HasSubstr("65 bytes")));
}

// In every assignment that says all, and in nothing else.
TEST_F(CoordinatorServiceTest, SecretOfAJob_IsToldToItsMembersAlone) {
  for (const char* worker : {"a", "b"}) ASSERT_OK(Join(worker));
  ASSERT_OK_AND_ASSIGN(const v1::CreateJobReply created, Create(SmallSpec("j", 2)));
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply to_a, Beat("a"));
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply to_b, Beat("b"));
  const std::string secret = to_a.assignments(0).secret();
  EXPECT_EQ(secret.size(), 16u);
  EXPECT_EQ(to_b.assignments(0).secret(), secret);
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply known, Beat("a", to_a));
  EXPECT_EQ(known.assignments(0).secret(), "") << "it knows it";
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription described, Describe("j"));
  ASSERT_OK_AND_ASSIGN(const v1::ListJobsReply list, Call(&v1::Coordinator::Stub::ListJobs, v1::ListJobsRequest()));
  for (const std::string& bytes :
       {created.SerializeAsString(), described.SerializeAsString(), list.SerializeAsString()}) {
    EXPECT_THAT(bytes, ::testing::Not(HasSubstr(secret)));
  }
  ASSERT_OK(Create(SmallSpec("k", 2)));
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply both, Beat("b", to_b));
  ASSERT_EQ(both.assignments_size(), 2);
  EXPECT_EQ(both.assignments(1).secret().size(), 16u);
  EXPECT_NE(both.assignments(1).secret(), secret);
}

TEST_F(CoordinatorServiceTest, Kept_IsWhatJoinAndHeartbeatSay) {
  v1::JoinRequest join = JoinRequestOf("a", 1);
  join.set_retained(true);
  ASSERT_OK(Call(&v1::Coordinator::Stub::Join, join));
  ASSERT_OK(Create(SmallSpec("j", 1)));
  EXPECT_TRUE(Describe("j")->members(0).kept());
  ASSERT_OK(Beat("a"));
  EXPECT_FALSE(Describe("j")->members(0).kept());
  v1::HeartbeatRequest beat;
  beat.set_name("a");
  beat.set_incarnation(1);
  beat.set_retained(true);
  ASSERT_OK(Call(&v1::Coordinator::Stub::Heartbeat, beat));
  EXPECT_TRUE(Describe("j")->members(0).kept());
}

TEST_F(CoordinatorServiceTest, PlanHashDiffers_NamesBoth) {
  ASSERT_OK(Join("a"));
  ASSERT_OK_AND_ASSIGN(const v1::CreateJobReply created, Create(SmallSpec("j", 1)));
  ASSERT_OK_AND_ASSIGN(const v1::HeartbeatReply told, Beat("a"));
  const std::string other(32, 'e');
  EXPECT_THAT(Beat("a", told, other),
              StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr(other), HasSubstr(created.job().plan_hash()))));
  EXPECT_EQ(Describe("j")->state(), v1::JOB_STATE_WAITING);
  EXPECT_THAT(Describe("j")->waiting_for(), HasSubstr("1 live worker on one host"));
  EXPECT_THAT(Beat("a", told, "xyz"), StatusIs(Code::kInvalidArgument, HasSubstr("plan_hash is \"xyz\"")));
}

}  // namespace
}  // namespace shardmesh
