// Contract 6: bad input gets a typed error that names the value and what would be right, no state changes, and the job
// goes on: after each, the next good step is applied as if nothing had been.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/matchers.h"
#include "local/process/host_id.h"
#include "proto/convert.h"
#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/testing/generic_call.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/raw_trainer.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::RawTrainer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kTimeout = absl::Seconds(10);

class BadInput : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec_));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK_AND_ASSIGN(trainer_, RawTrainer::Create(job_));
    GoodStep();
  }
  // The job learnt what an undisturbed one does.
  void TearDown() override {
    if (HasFatalFailure()) return;
    GoodStep();
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, step_));
    ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, spec_, step_));
    EXPECT_EQ(learnt, undisturbed);
  }
  void GoodStep() { ASSERT_OK(trainer_->WholeStep(++step_)); }
  int64_t next() const { return step_ + 1; }

  absl::Status Create(const v1::CreateJobRequest& request) {
    return client_->coordinator().CreateJob(request, kTimeout).status();
  }
  v1::CreateJobRequest GoodRequest(const std::string& name) const {
    v1::CreateJobRequest request;
    *request.mutable_spec() = ToProto(testing::TinyJob(name, "fsdp=2", 1));
    return request;
  }
  // Pushes these messages, as they are, to rank 0.
  absl::Status PushMessages(const std::vector<v1::PushChunk>& chunks) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kTimeout));
    v1::PushReply reply;
    const auto writer = trainer_->stub(Rank(0)).Push(&context, &reply);
    for (const v1::PushChunk& chunk : chunks) writer->Write(chunk);
    writer->WritesDone();
    return FromGrpc(writer->Finish(), "Push");
  }
  v1::PushChunk First(const std::string& data) const {
    v1::PushChunk chunk;
    *chunk.mutable_header() = trainer_->Header(0, next(), 0);
    chunk.set_data(data);
    return chunk;
  }
  std::string Pushed() const { return testing::GradientShard(*job_, Slot(0), Step(next()), 0); }

  const JobSpec spec_ = testing::OddJob("job", "fsdp=2", 2);
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<RawTrainer> trainer_;
  int64_t step_ = 0;
};

TEST_F(BadInput, UnknownJobAndName) {
  EXPECT_THAT(client_->OpenJob("jib"), StatusIs(Code::kNotFound, AllOf(HasSubstr("jib"), HasSubstr("job"))));
  v1::StepRequest elsewhere = trainer_->Request({0, 1}, next());
  elsewhere.set_job("jib");
  EXPECT_THAT(job_->worker(Rank(0)).Step(elsewhere, kTimeout), StatusIs(Code::kNotFound, HasSubstr("jib")));
  EXPECT_THAT(job_->Resolve("layers.9.weight"), StatusIs(Code::kNotFound, HasSubstr("layers.9.weight")));
  v1::ResolveNamesRequest names;
  names.set_job("job");
  names.add_raw_names("layers.0.weigth");
  EXPECT_THAT(client_->coordinator().ResolveNames(names, kTimeout),
              StatusIs(Code::kNotFound, AllOf(HasSubstr("layers.0.weigth"), HasSubstr("layers.0.weight"))));
}

TEST_F(BadInput, SpecificationsThatAreNone) {
  v1::CreateJobRequest request = GoodRequest("bad");
  request.mutable_spec()->mutable_parameters(0)->set_format(static_cast<v1::Format>(99));
  EXPECT_THAT(Create(request), StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("99"), HasSubstr("format"))));
  request = GoodRequest("bad");
  request.mutable_spec()->mutable_parameters(0)->set_shape(0, -3);
  EXPECT_THAT(Create(request), StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("\"w\""), HasSubstr("-3"))));
  request = GoodRequest("bad");
  request.mutable_spec()->set_slots(129);
  EXPECT_THAT(Create(request), StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("129"), HasSubstr("128"))));
  request = GoodRequest("bad");
  request.mutable_spec()->mutable_mesh(0)->set_size(0);
  EXPECT_THAT(Create(request), StatusIs(Code::kInvalidArgument, HasSubstr("fsdp")));
  request = GoodRequest("bad");
  request.mutable_spec()->clear_optimizer();
  EXPECT_THAT(Create(request), StatusIs(Code::kInvalidArgument, HasSubstr("optimizer")));
  request = GoodRequest("bad");
  *request.mutable_spec()->add_parameters() = request.spec().parameters(0);
  request.mutable_spec()->mutable_parameters(1)->set_name("_orig_mod.w");
  EXPECT_THAT(Create(request), StatusIs(Code::kAlreadyExists, AllOf(HasSubstr("_orig_mod.w"), HasSubstr("\"w\""))));
  EXPECT_THAT(client_->OpenJob("bad"), StatusIs(Code::kNotFound, HasSubstr("bad")));
}

TEST_F(BadInput, SecondJobOfTheSameName) {
  JobSpec other = spec_;
  other.parameters[1].shape = {129, 66};
  EXPECT_THAT(client_->CreateJob(other),
              StatusIs(Code::kAlreadyExists,
                       AllOf(HasSubstr("layers.0.weight"), HasSubstr("[129,65]"), HasSubstr("[129,66]"))));
  other = spec_;
  other.optimizer.beta2 = 0.95;
  EXPECT_THAT(client_->CreateJob(other), StatusIs(Code::kAlreadyExists, AllOf(HasSubstr("beta2"), HasSubstr("0.95"))));
  EXPECT_OK(client_->CreateJob(spec_));  // the same one is found
}

TEST_F(BadInput, PushOfAnotherShape) {
  v1::PushHeader header = trainer_->Header(0, next(), 0);
  const std::string expected = absl::StrCat(job_->plan().GradientShardBytes(0));
  EXPECT_THAT(job_->worker(Rank(0)).Push(header, {"1234"}, kTimeout),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("gradient shard of 4 bytes"), HasSubstr(expected))));
  header.set_shard(1);
  EXPECT_THAT(job_->worker(Rank(0)).Push(header, {Pushed()}, kTimeout),
              StatusIs(Code::kInvalidArgument, HasSubstr("shard 1")));
  header = trainer_->Header(5, next(), 0);
  EXPECT_THAT(job_->worker(Rank(0)).Push(header, {Pushed()}, kTimeout),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("slot 5"), HasSubstr("0 to 1"))));
  std::map<std::string, std::vector<float>> values = testing::InitialWeights(spec_);
  values["layers.0.bias"].push_back(1);
  EXPECT_THAT(job_->Initialize(values, kTimeout),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("layers.0.bias"), HasSubstr("8 elements"), HasSubstr("7 needed"))));
}

TEST_F(BadInput, PushesOfOtherSteps) {
  ASSERT_OK_AND_ASSIGN(const v1::PushReply reply, trainer_->Push(0, step_, 0));
  EXPECT_TRUE(reply.applied());
  EXPECT_THAT(trainer_->Push(0, next() + 1, 0),
              StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr(absl::StrCat("step ", next() + 1)),
                                                        HasSubstr(absl::StrCat("the next is ", next())))));
  EXPECT_THAT(trainer_->Push(0, 0, 0), StatusIs(Code::kInvalidArgument, HasSubstr("step of a gradient is 0")));
  EXPECT_THAT(trainer_->Step(0, {0, 1}, next()),
              StatusIs(Code::kFailedPrecondition, HasSubstr("lacks the gradient of shard")));
}

TEST_F(BadInput, BrokenPushStreams) {
  const std::string whole = Pushed(), half = whole.substr(0, whole.size() / 2);
  EXPECT_THAT(PushMessages({}), StatusIs(Code::kInvalidArgument, HasSubstr("without any message")));
  EXPECT_THAT(
      PushMessages({First(half)}),
      StatusIs(Code::kInvalidArgument, AllOf(HasSubstr(absl::StrCat("after ", half.size())), HasSubstr("ended"))));
  v1::PushChunk more;
  more.set_data(half + "x");
  EXPECT_THAT(PushMessages({First(half), more}), StatusIs(Code::kInvalidArgument, HasSubstr("more than")));
  EXPECT_THAT(PushMessages({more}), StatusIs(Code::kInvalidArgument, HasSubstr("no header")));
  more = First(whole.substr(half.size()));
  EXPECT_THAT(PushMessages({First(half), more}), StatusIs(Code::kInvalidArgument, HasSubstr("second header")));
  v1::PushChunk lying = First(half);
  lying.mutable_header()->set_total_bytes(int64_t{1} << 50);
  EXPECT_THAT(PushMessages({lying}), StatusIs(Code::kInvalidArgument, HasSubstr("1125899906842624")));
  lying = First(half);
  lying.mutable_header()->set_content(v1::PushHeader::CONTENT_UNSPECIFIED);
  EXPECT_THAT(PushMessages({lying}), StatusIs(Code::kInvalidArgument, HasSubstr("content is 0")));
}

TEST_F(BadInput, WrongEpoch) {
  const std::string current = absl::StrCat(job_->epoch().value());
  v1::PushHeader header = trainer_->Header(0, next(), 0);
  header.set_epoch(job_->epoch().value() + 7);
  EXPECT_THAT(job_->worker(Rank(0)).Push(header, {Pushed()}, kTimeout), StatusIs(Code::kAborted, HasSubstr(current)));
  v1::StepRequest request = trainer_->Request({0}, next());
  request.set_epoch(job_->epoch().value() + 7);
  EXPECT_THAT(job_->worker(Rank(0)).Step(request, kTimeout), StatusIs(Code::kAborted, HasSubstr(current)));
  v1::AttachRequest attach;
  attach.set_job("job");
  attach.set_epoch(job_->epoch().value() + 7);
  attach.add_slots(0);
  attach.set_host_id("elsewhere");
  EXPECT_THAT(job_->worker(Rank(0)).Attach(attach, kTimeout), StatusIs(Code::kAborted, HasSubstr(current)));
  attach.set_epoch(job_->epoch().value());
  EXPECT_THAT(job_->worker(Rank(0)).Attach(attach, kTimeout),
              StatusIs(Code::kFailedPrecondition, HasSubstr("elsewhere")));
}

TEST_F(BadInput, OtherLearningRateThanAnotherSlot) {
  ASSERT_OK(trainer_->PushAll(next()));
  v1::StepRequest request = trainer_->Request({0}, next());
  EXPECT_THAT(job_->worker(Rank(0)).Step(request, absl::Milliseconds(300)),  // declares slot 0; slot 1 is missing
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr(absl::StrCat("step ", next(), " was not committed in time; missing slots: 1"))));
  request = trainer_->Request({1}, next());
  request.set_learning_rates(0, 0.5);
  EXPECT_THAT(job_->worker(Rank(1)).Step(request, kTimeout),
              StatusIs(Code::kInvalidArgument, HasSubstr("learning rate 0.5")));
  request.set_learning_rates(0, -1);
  EXPECT_THAT(job_->worker(Rank(1)).Step(request, kTimeout),
              StatusIs(Code::kInvalidArgument, HasSubstr("learning rate is -1")));
}

TEST_F(BadInput, VersionsThatAreNotThere) {
  EXPECT_THAT(job_->Pull({VersionChoice::kExact, Step(77)}, kTimeout),
              StatusIs(Code::kOutOfRange, AllOf(HasSubstr("version 77"), HasSubstr("published: "))));
  EXPECT_THAT(job_->Pull({VersionChoice::kAtLeast, Step(77)}, absl::Milliseconds(300)),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("77")));
}

TEST_F(BadInput, StaleIncarnation) {
  const v1::Member& member = job_->members()[0];
  v1::HeartbeatRequest heartbeat;
  heartbeat.set_name(member.worker());
  heartbeat.set_incarnation(member.incarnation() - 1);
  const std::string current = absl::StrCat(member.incarnation());
  EXPECT_THAT(client_->coordinator().Heartbeat(heartbeat, kTimeout), StatusIs(Code::kAborted, HasSubstr(current)));
  v1::JoinRequest join;
  join.set_name(member.worker());
  join.set_incarnation(member.incarnation() - 1);
  join.set_address("127.0.0.1:1");
  join.set_host_id("h");
  join.set_local_socket("/s");
  join.set_pid(1);
  EXPECT_THAT(client_->coordinator().Join(join, kTimeout), StatusIs(Code::kAborted, HasSubstr(current)));
  join.set_incarnation(member.incarnation() + 1);
  EXPECT_THAT(client_->coordinator().Join(join, kTimeout), StatusIs(Code::kAlreadyExists, HasSubstr("is alive")));
  v1::LeaveRequest leave;
  leave.set_name(member.worker());
  leave.set_incarnation(member.incarnation() - 1);
  EXPECT_THAT(client_->coordinator().Leave(leave, kTimeout), StatusIs(Code::kAborted, HasSubstr(current)));
}

TEST_F(BadInput, WorkerThatComputesAnotherPlan) {
  ASSERT_OK_AND_ASSIGN(const std::string host_id, HostId());
  v1::JoinRequest join;
  join.set_name("a-fake");
  join.set_incarnation(1);
  join.set_address("127.0.0.1:1");
  join.set_host_id(host_id);
  join.set_local_socket("/nowhere");
  join.set_pid(1);
  ASSERT_OK(client_->coordinator().Join(join, kTimeout));
  v1::CreateJobRequest request;
  *request.mutable_spec() = ToProto(testing::TinyJob("wide", "fsdp=3", 1));
  ASSERT_OK_AND_ASSIGN(const v1::CreateJobReply created, client_->coordinator().CreateJob(request, kTimeout));
  ASSERT_EQ(created.job().state(), v1::JOB_STATE_PREPARING);
  v1::HeartbeatRequest heartbeat;
  heartbeat.set_name("a-fake");
  heartbeat.set_incarnation(1);
  v1::MemberStatus& status = *heartbeat.add_jobs();
  status.set_job("wide");
  status.set_epoch(created.job().epoch());
  for (const v1::Member& member : created.job().members()) {
    if (member.worker() == "a-fake") status.set_rank(member.rank());
  }
  status.set_state(v1::MEMBER_STATE_READY);
  status.set_plan_hash(std::string(32, 'f'));
  EXPECT_THAT(client_->coordinator().Heartbeat(heartbeat, kTimeout),
              StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr(std::string(32, 'f')), HasSubstr(created.job().plan_hash()))));
  v1::DescribeJobRequest describe;
  describe.set_job("wide");
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription after, client_->coordinator().DescribeJob(describe, kTimeout));
  EXPECT_EQ(after.state(), v1::JOB_STATE_WAITING) << after.error();
  ASSERT_OK(testing::Delete(*client_, "wide"));
  v1::LeaveRequest leave;
  leave.set_name("a-fake");
  leave.set_incarnation(1);
  ASSERT_OK(client_->coordinator().Leave(leave, kTimeout));
}

// Bytes that are no protobuf message, as the request of each method that takes one message.
TEST_F(BadInput, BodyThatIsNoMessage_EveryMethod) {
  for (const auto& [address, service] : {std::pair(cluster_->coordinator_address(), "shardmesh.v1.Coordinator"),
                                         {job_->members()[0].address(), "shardmesh.v1.Shard"}}) {
    ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(address));
    const auto* found = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
    ASSERT_NE(found, nullptr);
    for (int i = 0; i < found->method_count(); ++i) {
      const auto* method = found->method(i);
      if (method->client_streaming()) continue;
      EXPECT_THAT(
          testing::GenericCall(channel, absl::StrCat("/", service, "/", method->name()), "\xff\xff\xff"),
          StatusIs(Code::kInvalidArgument,
                   ::testing::AnyOf(HasSubstr(absl::StrCat("is no ", method->input_type()->name())),
                                    HasSubstr(absl::StrCat("cannot be parsed as ", method->input_type()->full_name())))))
          << method->full_name();
    }
  }
}

template <typename Stub, typename Request, typename Reply>
void ExpectRefused(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                   const char* what) {
  grpc::ClientContext context;
  Reply reply;
  const grpc::Status status = (stub.*method)(&context, Request(), &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << what;
  EXPECT_THAT(status.error_message(), HasSubstr("no deadline set")) << what;
}

TEST_F(BadInput, NoDeadline_EveryMethod) {
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(cluster_->coordinator_address()));
  const auto coordinator = v1::Coordinator::NewStub(channel);
  using C = v1::Coordinator::Stub;
  ExpectRefused<C, v1::CreateJobRequest, v1::CreateJobReply>(*coordinator, &C::CreateJob, "CreateJob");
  ExpectRefused<C, v1::DescribeJobRequest, v1::JobDescription>(*coordinator, &C::DescribeJob, "DescribeJob");
  ExpectRefused<C, v1::ListJobsRequest, v1::ListJobsReply>(*coordinator, &C::ListJobs, "ListJobs");
  ExpectRefused<C, v1::DeleteJobRequest, v1::DeleteJobReply>(*coordinator, &C::DeleteJob, "DeleteJob");
  ExpectRefused<C, v1::ResolveNamesRequest, v1::ResolveNamesReply>(*coordinator, &C::ResolveNames, "ResolveNames");
  ExpectRefused<C, v1::GetPlanRequest, v1::GetPlanReply>(*coordinator, &C::GetPlan, "GetPlan");
  ExpectRefused<C, v1::ListVersionsRequest, v1::ListVersionsReply>(*coordinator, &C::ListVersions, "ListVersions");
  ExpectRefused<C, v1::JoinRequest, v1::JoinReply>(*coordinator, &C::Join, "Join");
  ExpectRefused<C, v1::HeartbeatRequest, v1::HeartbeatReply>(*coordinator, &C::Heartbeat, "Heartbeat");
  ExpectRefused<C, v1::LeaveRequest, v1::LeaveReply>(*coordinator, &C::Leave, "Leave");
  v1::Shard::Stub& shard = trainer_->stub(Rank(0));
  using S = v1::Shard::Stub;
  ExpectRefused<S, v1::StepRequest, v1::StepReply>(shard, &S::Step, "Step");
  ExpectRefused<S, v1::AttachRequest, v1::AttachReply>(shard, &S::Attach, "Attach");
  ExpectRefused<S, v1::DigestRequest, v1::DigestReply>(shard, &S::Digest, "Digest");
  ExpectRefused<S, v1::GetStatusRequest, v1::GetStatusReply>(shard, &S::GetStatus, "GetStatus");
  ExpectRefused<S, v1::GetTraceRequest, v1::GetTraceReply>(shard, &S::GetTrace, "GetTrace");
  {
    grpc::ClientContext context;
    v1::PushReply reply;
    const auto writer = shard.Push(&context, &reply);
    writer->Write(First(""));
    EXPECT_THAT(FromGrpc(writer->Finish(), "Push"),
                StatusIs(Code::kInvalidArgument, HasSubstr("no deadline set on Shard.Push")));
  }
  grpc::ClientContext context;
  v1::PullRequest request;
  request.set_job("job");
  request.set_latest(true);
  const auto reader = shard.Pull(&context, request);
  v1::PullChunk chunk;
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_THAT(FromGrpc(reader->Finish(), "Pull"),
              StatusIs(Code::kInvalidArgument, HasSubstr("no deadline set on Shard.Pull")));
}

}  // namespace
}  // namespace shardmesh
