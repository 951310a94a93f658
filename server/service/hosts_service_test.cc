// Heartbeats of a host's workers through gRPC.
#include "server/service/hosts_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "proto/convert.h"
#include "rpc/base/deadline.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "server/coordinator/testing/small_jobs.h"
#include "server/service/coordinator_messages.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Answer = v1::HostHeartbeatReplies::Answer;
using Code = absl::StatusCode;

class HostsServiceTest : public ::testing::Test {
 protected:
  HostsServiceTest() {
    CoordinatorOptions options;
    options.new_secret = [] { return std::string(); };
    coordinator_ = std::make_unique<CoordinatorService>(
        CoordinatorServiceOptions(), shardmesh::Coordinator::Create(options, NewMemoryStore(), clock_.Now()).value(),
        clock_);
    hosts_ = std::make_unique<HostsService>(*coordinator_);
    server_ = Server::Start(ServerOptions(), {coordinator_.get(), hosts_.get()}).value();
    channel_ = NewChannel(server_->address()).value();
    Begin();
  }
  ~HostsServiceTest() override {
    if (context_ != nullptr) context_->TryCancel();
    server_->Drain(absl::ZeroDuration());
  }

  void Begin(absl::Duration deadline = absl::Seconds(60)) {
    context_ = std::make_unique<grpc::ClientContext>();
    if (deadline < absl::InfiniteDuration()) context_->set_deadline(DeadlineIn(deadline));
    stream_ = v1::Hosts::NewStub(channel_)->Heartbeats(context_.get());
  }
  // How the call ended.
  absl::Status End() {
    const absl::Status status = FromGrpc(stream_->Finish(), "coordinator");
    context_ = nullptr;
    return status;
  }
  v1::HostHeartbeatReplies Reply(const v1::HostHeartbeats& message) {
    v1::HostHeartbeatReplies replies;
    EXPECT_TRUE(stream_->Write(message) && stream_->Read(&replies));
    return replies;
  }
  std::vector<Answer> Exchange(const v1::HostHeartbeats& message) {
    const v1::HostHeartbeatReplies replies = Reply(message);
    return {replies.answers().begin(), replies.answers().end()};
  }
  Answer Exchange(int place, const v1::HeartbeatRequest* heartbeat) {
    v1::HostHeartbeats message;
    message.add_workers()->set_place(place);
    if (heartbeat != nullptr) *message.mutable_workers(0)->mutable_heartbeat() = *heartbeat;
    const std::vector<Answer> answers = Exchange(message);
    return answers.size() == 1 ? answers[0] : Answer();
  }
  static v1::HeartbeatRequest Heartbeat(const std::string& worker, const v1::HeartbeatReply& told = {}) {
    v1::HeartbeatRequest request;
    request.set_name(worker);
    request.set_incarnation(1);
    for (const v1::Assignment& assignment : told.assignments()) {
      v1::MemberStatus* status = request.add_jobs();
      status->set_job(assignment.spec().name());
      status->set_epoch(assignment.epoch());
      status->set_rank(assignment.rank());
      status->set_state(v1::MEMBER_STATE_READY);
      status->set_plan_hash(assignment.plan_hash());
      status->set_committed_step(-1);
    }
    return request;
  }
  void Join(const std::string& worker) {
    v1::JoinRequest request;
    request.set_name(worker);
    request.set_incarnation(1);
    request.set_address("localhost:1");
    request.set_host_id("h1");
    request.set_local_socket("/run/s");
    request.set_pid(7);
    grpc::ClientContext context;
    context.set_deadline(DeadlineIn(absl::Seconds(20)));
    v1::JoinReply reply;
    ASSERT_TRUE(v1::Coordinator::NewStub(channel_)->Join(&context, request, &reply).ok());
  }
  // Worker "a" has a job alone, and its heartbeat is kept at place 0.
  void BeginAtRest() {
    Join("a");
    Create(SmallSpec("j", 1));
    const v1::HeartbeatRequest a = Heartbeat("a");
    const v1::HeartbeatRequest ready = Heartbeat("a", Exchange(0, &a).reply());
    for (int i = 0; i < 2; ++i) Exchange(0, &ready);
  }
  void Create(const JobSpec& spec) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = ToProto(spec);
    grpc::ClientContext context;
    context.set_deadline(DeadlineIn(absl::Seconds(20)));
    v1::CreateJobReply reply;
    ASSERT_TRUE(v1::Coordinator::NewStub(channel_)->CreateJob(&context, request, &reply).ok());
  }

  ManualClock clock_;
  std::unique_ptr<CoordinatorService> coordinator_;
  std::unique_ptr<HostsService> hosts_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::HostHeartbeats, v1::HostHeartbeatReplies>> stream_;
};

TEST_F(HostsServiceTest, EachWorkerIsAnswered_AndOneThatIsAsBefore_WithoutAWord) {
  for (const char* worker : {"a", "b"}) Join(worker);
  Create(SmallSpec("j", 2));
  v1::HostHeartbeats message;
  for (int i = 0; i < 2; ++i) {
    message.add_workers()->set_place(i);
    *message.mutable_workers(i)->mutable_heartbeat() = Heartbeat(i == 0 ? "a" : "b");
  }
  const std::vector<Answer> told = Exchange(message);
  ASSERT_EQ(told.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(told[i].code(), 0) << told[i].message();
    EXPECT_EQ(told[i].reply().assignments(0).rank(), i);
    EXPECT_EQ(told[i].reply().assignments(0).peers_size(), 2);
  }
  const v1::HeartbeatRequest a = Heartbeat("a", told[0].reply()), b = Heartbeat("b", told[1].reply());
  EXPECT_EQ(Exchange(0, &a).reply().assignments(0).epoch(), 1);
  EXPECT_EQ(Exchange(1, &b).reply().assignments(0).epoch(), 1);  // the job is READY with that
  EXPECT_FALSE(Exchange(0, nullptr).same()) << "it is told anew what may have changed";
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(Exchange(0, nullptr).same());
  Create(SmallSpec("k", 2));
  const Answer both = Exchange(0, nullptr);
  EXPECT_FALSE(both.same());
  EXPECT_EQ(both.reply().assignments_size(), 2) << "what it has to hold has changed";
}

v1::HostHeartbeats Again() {
  v1::HostHeartbeats message;
  message.set_again(true);
  return message;
}

TEST_F(HostsServiceTest, AHostThatIsAsBefore_IsHeardByOneWord) {
  for (const char* worker : {"a", "b"}) Join(worker);
  v1::HostHeartbeats message;
  for (int i = 0; i < 2; ++i) {
    message.add_workers()->set_place(i);
    *message.mutable_workers(i)->mutable_heartbeat() = Heartbeat(i == 0 ? "a" : "b");
  }
  v1::HostHeartbeatReplies told = Reply(message);
  EXPECT_TRUE(told.takes_again());
  EXPECT_EQ(told.skip_within_ms(), 0) << "they have no job, and would hear of one late";
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(absl::Seconds(2));
    ASSERT_OK(coordinator_->Tick());
    told = Reply(Again());
    EXPECT_TRUE(told.same() && told.takes_again());
    EXPECT_EQ(told.answers_size(), 0);
  }
  Create(SmallSpec("j", 2));
  told = Reply(Again());
  EXPECT_FALSE(told.same());
  ASSERT_EQ(told.answers_size(), 2);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(told.answers(i).reply().assignments(0).rank(), i);
}

// A host that leaves out every second message is there, and hears of a job with its next one.
TEST_F(HostsServiceTest, AMessage_MayBeLeftOut_WhereEachWorkerHoldsJobs) {
  ASSERT_NO_FATAL_FAILURE(BeginAtRest());
  EXPECT_EQ(Reply(Again()).skip_within_ms(), 600) << "of a time-out of 3 s";
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(absl::Milliseconds(1200));
    ASSERT_OK(coordinator_->Tick());
    const v1::HostHeartbeatReplies told = Reply(Again());
    ASSERT_TRUE(told.same());
    ASSERT_EQ(told.skip_within_ms(), 600);
  }
  Create(SmallSpec("k", 1));
  const v1::HostHeartbeatReplies told = Reply(Again());
  ASSERT_EQ(told.answers_size(), 1);
  EXPECT_EQ(told.answers(0).reply().assignments_size(), 2);
}

// A spare would hear of its first job late.
TEST_F(HostsServiceTest, NoMessage_MayBeLeftOut_WhereAWorkerHoldsNone) {
  ASSERT_NO_FATAL_FAILURE(BeginAtRest());
  Join("spare");
  const v1::HeartbeatRequest spare = Heartbeat("spare");
  for (const bool first : {true, false}) {
    v1::HostHeartbeats message;
    for (const int place : {first ? 7 : 0, first ? 0 : 7}) {
      message.add_workers()->set_place(place);
      if (place == 7) *message.mutable_workers()->rbegin()->mutable_heartbeat() = spare;
    }
    const v1::HostHeartbeatReplies told = Reply(message);
    EXPECT_TRUE(told.takes_again());
    EXPECT_EQ(told.skip_within_ms(), 0) << "the spare comes " << (first ? "first" : "last");
    EXPECT_EQ(Reply(Again()).skip_within_ms(), 0);
  }
}

TEST_F(HostsServiceTest, Again_WhereItMayNotBe_EndsTheCall) {
  stream_->Write(Again());
  EXPECT_THAT(End(), StatusIs(Code::kInvalidArgument, HasSubstr("the last reply has no `takes_again`")));
  Begin();
  Join("a");
  const v1::HeartbeatRequest a = Heartbeat("a");
  Exchange(0, &a);
  v1::HostHeartbeats message = Again();
  message.add_workers();
  stream_->Write(message);
  EXPECT_THAT(End(), StatusIs(Code::kInvalidArgument, HasSubstr("`again` and has 1 workers")));
  Begin();
  const v1::HeartbeatRequest nobody = Heartbeat("nobody");
  Exchange(0, &a);
  Exchange(1, &nobody);
  stream_->Write(Again());
  EXPECT_THAT(End(), StatusIs(Code::kInvalidArgument, HasSubstr("takes_again"))) << "nothing was kept of the last one";
}

// By what it sends without a word a worker stays alive.
TEST_F(HostsServiceTest, AWorkerThatIsAsBefore_IsHeard) {
  Join("a");
  const v1::HeartbeatRequest a = Heartbeat("a");
  Exchange(0, &a);
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(absl::Seconds(2));
    ASSERT_OK(coordinator_->Tick());
    EXPECT_TRUE(Exchange(0, nullptr).same());
  }
  clock_.Advance(absl::Seconds(10));
  EXPECT_FALSE(Exchange(0, nullptr).same()) << "it was silent: the whole counts";
}

TEST_F(HostsServiceTest, ARefusedHeartbeat_IsOneAnswer_AndTheOthersCount) {
  Join("a");
  v1::HostHeartbeats message;
  message.add_workers()->set_place(0);
  *message.mutable_workers(0)->mutable_heartbeat() = Heartbeat("nobody");
  message.add_workers()->set_place(5);
  *message.mutable_workers(1)->mutable_heartbeat() = Heartbeat("a");
  message.add_workers()->set_place(6);  // it never had one
  message.add_workers()->set_place(7);
  *message.mutable_workers(3)->mutable_heartbeat() = Heartbeat("a");
  message.mutable_workers(3)->mutable_heartbeat()->set_incarnation(-1);
  const std::vector<Answer> answers = Exchange(message);
  ASSERT_EQ(answers.size(), 4u);
  EXPECT_EQ(answers[0].code(), static_cast<int>(Code::kNotFound));
  EXPECT_THAT(answers[0].message(), HasSubstr("nobody"));
  EXPECT_FALSE(answers[0].kept());
  EXPECT_EQ(answers[1].code(), 0);
  EXPECT_TRUE(answers[1].kept());
  EXPECT_THAT(answers[2].message(), HasSubstr("no heartbeat of place 6 was kept"));
  EXPECT_EQ(answers[2].code(), static_cast<int>(Code::kInvalidArgument));
  EXPECT_EQ(answers[3].code(), static_cast<int>(Code::kInvalidArgument));
  EXPECT_EQ(Exchange(0, nullptr).code(), static_cast<int>(Code::kInvalidArgument)) << "nothing was kept of it";
}

TEST_F(HostsServiceTest, ASecretThatIsNotTheWorkers_IsRefused_WithTheNextIncarnation) {
  Join("a");
  v1::HeartbeatRequest a = Heartbeat("a");
  a.set_secret("guessed");
  const Answer answer = Exchange(0, &a);
  EXPECT_EQ(answer.code(), static_cast<int>(Code::kPermissionDenied));
  EXPECT_EQ(answer.next_incarnation(), 2);
}

TEST_F(HostsServiceTest, ABadMessage_EndsTheCall) {
  v1::HostHeartbeats message;
  message.add_workers()->set_place(1024);
  stream_->Write(message);
  EXPECT_THAT(End(), StatusIs(Code::kInvalidArgument, HasSubstr("place is 1024; it is 0 to 1023")));
  Begin();
  message.mutable_workers(0)->set_place(3);
  message.add_workers()->set_place(3);
  stream_->Write(message);
  EXPECT_THAT(End(), StatusIs(Code::kInvalidArgument, HasSubstr("place 3 comes twice")));
  Begin();
  for (int i = 0; i < 1025; ++i) message.add_workers();
  stream_->Write(message);
  EXPECT_THAT(End(), StatusIs(Code::kResourceExhausted, HasSubstr("at most 1024")));
  Begin(absl::InfiniteDuration());
  EXPECT_THAT(End(), StatusIs(Code::kInvalidArgument, HasSubstr("no deadline")));
}

// Memory of a call does not grow with what it is sent.
TEST_F(HostsServiceTest, ALargeHeartbeat_CountsAndIsNotKept) {
  Join("a");
  v1::HeartbeatRequest a = Heartbeat("a");
  for (int i = 0; i < 200; ++i) {
    v1::KeptCopies* const copies = a.add_copies();
    copies->set_job(absl::StrCat("job-", i));
    copies->set_epoch(1);
    copies->set_hosts(2);
    copies->set_mesh("fsdp=2");
    copies->set_step(1);
  }
  const Answer answer = Exchange(0, &a);
  EXPECT_EQ(answer.code(), 0) << answer.message();
  EXPECT_FALSE(answer.kept());
  EXPECT_EQ(Exchange(0, nullptr).code(), static_cast<int>(Code::kInvalidArgument));
}

// A call knows what it heard, and not what the coordinator heard by another way since.
TEST_F(HostsServiceTest, AfterAHeartbeatOutsideTheCall_TheWholeCounts) {
  Join("a");
  const v1::HeartbeatRequest a = Heartbeat("a");
  Exchange(0, &a);
  EXPECT_TRUE(Exchange(0, nullptr).same());
  grpc::ClientContext context;
  context.set_deadline(DeadlineIn(absl::Seconds(20)));
  v1::HeartbeatReply reply;
  ASSERT_TRUE(v1::Coordinator::NewStub(channel_)->Heartbeat(&context, a, &reply).ok());
  EXPECT_FALSE(Exchange(0, nullptr).same());
  EXPECT_TRUE(Exchange(0, nullptr).same());
}

// What all members know of each other does not grow with their number squared.
TEST(AssignmentToProto, OfManyRanks_HasThoseOfTheHost) {
  for (const int ranks : {64, 65, 4096}) {
    std::vector<WorkerIdentity> all;
    for (int rank = 0; rank < ranks; ++rank) {
      all.push_back(SmallWorker(absl::StrCat("w", rank), 1, absl::StrCat("h", rank / 8)));
    }
    Assignment assignment;
    assignment.definition = SmallJob("j", 2);
    assignment.rank = 21;
    assignment.peers = all;
    std::vector<int> told;
    const v1::Assignment proto = ToProto(assignment, /*known=*/false);
    for (const v1::Peer& peer : proto.peers()) {
      EXPECT_EQ(peer.worker(), absl::StrCat("w", peer.rank()));
      told.push_back(peer.rank());
    }
    if (ranks == 64) {
      EXPECT_EQ(told.size(), 64u);
    } else {
      EXPECT_EQ(told, (std::vector<int>{0, 16, 17, 18, 19, 20, 21, 22, 23}));
      EXPECT_LT(proto.ByteSizeLong(), 64u << 10);
    }
  }
}

TEST_F(HostsServiceTest, End_CancelsTheOpenCall_AndTheNext) {
  Join("a");
  const v1::HeartbeatRequest a = Heartbeat("a");
  Exchange(0, &a);
  hosts_->End();
  EXPECT_THAT(End(), StatusIs(Code::kCancelled, HasSubstr("")));
  Begin();
  EXPECT_THAT(End(), StatusIs(Code::kCancelled, HasSubstr("")));
}

}  // namespace
}  // namespace shardmesh
