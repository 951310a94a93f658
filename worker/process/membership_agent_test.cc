#include "worker/process/membership_agent.h"

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);

// A coordinator in this process, of which tests set the answers and read the calls.
class FakeCoordinator final : public CoordinatorTransport {
 public:
  // Heartbeats of incarnations before that one; the refusal says it.
  void RefuseBelow(int64_t incarnation) {
    MutexLock lock(mu_);
    stale_below_ = incarnation;
  }
  void Answer(absl::Status join, absl::Status heartbeat) {
    MutexLock lock(mu_);
    join_ = std::move(join);
    heartbeat_ = std::move(heartbeat);
  }
  void Assign(v1::Assignment assignment) {
    MutexLock lock(mu_);
    assignments_ = {std::move(assignment)};
  }

  // Waits until `done` holds, looked at after every call.
  bool Await(const std::function<bool(const FakeCoordinator&)>& done) {
    const absl::Time deadline = MonotonicNow() + kLong;
    MutexLock lock(mu_);
    while (!done(*this) && MonotonicNow() < deadline) changed_.WaitFor(mu_, deadline - MonotonicNow());
    return done(*this);
  }
  bool AwaitMore(int joins, int heartbeats) {
    int joins_before, heartbeats_before;
    {
      MutexLock lock(mu_);
      joins_before = joins_made;
      heartbeats_before = heartbeats_made;
    }
    return Await([=](const FakeCoordinator& c) {
      return c.joins_made >= joins_before + joins && c.heartbeats_made >= heartbeats_before + heartbeats;
    });
  }

  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request, absl::Duration) override {
    MutexLock lock(mu_);
    ++joins_made;
    last_join = request;
    joins.push_back(request);
    changed_.SignalAll();
    RETURN_IF_ERROR(join_);
    v1::JoinReply reply;
    reply.set_heartbeat_interval_ms(5);
    reply.set_heartbeat_timeout_ms(1234);
    return reply;
  }
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request, absl::Duration) override {
    MutexLock lock(mu_);
    ++heartbeats_made;
    last_heartbeat = request;
    beat_secrets.push_back(request.secret());
    changed_.SignalAll();
    if (request.incarnation() < stale_below_) {
      return WithNextIncarnation(absl::AbortedError("it is stale"), stale_below_);
    }
    RETURN_IF_ERROR(heartbeat_);
    v1::HeartbeatReply reply;
    for (const v1::Assignment& assignment : assignments_) *reply.add_assignments() = assignment;
    return reply;
  }
  absl::StatusOr<v1::LeaveReply> Leave(const v1::LeaveRequest& request, absl::Duration) override {
    MutexLock lock(mu_);
    leaves.push_back(request);
    return v1::LeaveReply();
  }

  absl::StatusOr<v1::CreateJobReply> CreateJob(const v1::CreateJobRequest&, absl::Duration) override { return No(); }
  absl::StatusOr<v1::JobDescription> DescribeJob(const v1::DescribeJobRequest&, absl::Duration) override {
    return No();
  }
  absl::StatusOr<v1::ListJobsReply> ListJobs(const v1::ListJobsRequest&, absl::Duration) override { return No(); }
  absl::StatusOr<v1::JobDescription> ReshardJob(const v1::ReshardJobRequest&, absl::Duration) override { return No(); }
  absl::StatusOr<v1::RecordCheckpointReply> RecordCheckpoint(const v1::RecordCheckpointRequest&,
                                                             absl::Duration) override {
    return No();
  }
  absl::StatusOr<v1::DeleteJobReply> DeleteJob(const v1::DeleteJobRequest&, absl::Duration) override { return No(); }
  absl::StatusOr<v1::ResolveNamesReply> ResolveNames(const v1::ResolveNamesRequest&, absl::Duration) override {
    return No();
  }
  absl::StatusOr<v1::GetPlanReply> GetPlan(const v1::GetPlanRequest&, absl::Duration) override { return No(); }
  absl::StatusOr<v1::ListVersionsReply> ListVersions(const v1::ListVersionsRequest&, absl::Duration) override {
    return No();
  }

  // Read in Await's condition, or after the agent has stopped.
  int joins_made = 0, heartbeats_made = 0;
  v1::JoinRequest last_join;
  v1::HeartbeatRequest last_heartbeat;
  std::vector<v1::LeaveRequest> leaves;
  std::vector<v1::JoinRequest> joins;
  std::vector<std::string> beat_secrets;

 private:
  static absl::Status No() { return absl::UnimplementedError("not of membership"); }

  Mutex mu_;
  CondVar changed_;
  int64_t stale_below_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status join_, heartbeat_;
  std::vector<v1::Assignment> assignments_;
};

struct MembershipAgentTest : ::testing::Test {
  static v1::JoinRequest Identity() {
    v1::JoinRequest identity;
    identity.set_name("w1");
    identity.set_incarnation(42);
    identity.set_address("localhost:1");
    return identity;
  }
  static WorkerOptions Options() {
    WorkerOptions options;
    options.name = "w1";
    return options;
  }

  FakeCoordinator coordinator;
  Worker worker{Options(), NewProcessMemory()};
};

TEST_F(MembershipAgentTest, JoinsAndBeats_AndLeavesWhenStopped) {
  {
    MembershipAgent agent(coordinator, worker, Identity());
    ASSERT_OK(agent.AwaitJoined(kLong));
    EXPECT_EQ(worker.heartbeat_timeout(), absl::Milliseconds(1234));
    EXPECT_TRUE(coordinator.AwaitMore(0, 3));
    agent.Stop();
    agent.Stop();
  }
  EXPECT_EQ(coordinator.joins_made, 1);
  EXPECT_EQ(coordinator.last_join.address(), "localhost:1");
  EXPECT_EQ(coordinator.last_heartbeat.name(), "w1");
  EXPECT_EQ(coordinator.last_heartbeat.incarnation(), 42);
  ASSERT_EQ(coordinator.leaves.size(), 1u);
  EXPECT_EQ(coordinator.leaves[0].name(), "w1");
  EXPECT_EQ(coordinator.leaves[0].incarnation(), 42);
}

TEST_F(MembershipAgentTest, NoCoordinator_TriesAgainUntilThereIsOne) {
  coordinator.Answer(absl::UnavailableError("refused"), absl::OkStatus());
  MembershipAgent agent(coordinator, worker, Identity());
  EXPECT_TRUE(coordinator.AwaitMore(2, 0));
  EXPECT_THAT(agent.AwaitJoined(absl::Milliseconds(1)),
              StatusIs(Code::kDeadlineExceeded, AllOf(HasSubstr("within 1ms"), HasSubstr("refused"))));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  EXPECT_OK(agent.AwaitJoined(kLong));
}

TEST_F(MembershipAgentTest, NeverJoined_DoesNotLeave) {
  coordinator.Answer(absl::UnavailableError("refused"), absl::OkStatus());
  {
    MembershipAgent agent(coordinator, worker, Identity());
    EXPECT_TRUE(coordinator.AwaitMore(1, 0));
  }
  EXPECT_TRUE(coordinator.leaves.empty());
}

TEST_F(MembershipAgentTest, CoordinatorAwayAndBack_BeatsGoOnWithoutANewJoin) {
  MembershipAgent agent(coordinator, worker, Identity());
  ASSERT_OK(agent.AwaitJoined(kLong));
  coordinator.Answer(absl::OkStatus(), absl::UnavailableError("restarting"));
  EXPECT_TRUE(coordinator.AwaitMore(0, 2));
  EXPECT_OK(agent.AwaitJoined(kLong));  // it was
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  EXPECT_TRUE(coordinator.AwaitMore(0, 2));
  agent.Stop();
  EXPECT_EQ(coordinator.joins_made, 1);
}

TEST_F(MembershipAgentTest, Forgotten_JoinsAgainWithTheSameIncarnation) {
  MembershipAgent agent(coordinator, worker, Identity());
  ASSERT_OK(agent.AwaitJoined(kLong));
  coordinator.Answer(absl::OkStatus(), absl::NotFoundError("who?"));
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.joins_made >= 2; }));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  EXPECT_TRUE(coordinator.AwaitMore(0, 3));
  agent.Stop();
  EXPECT_EQ(coordinator.last_join.incarnation(), 42);
  EXPECT_EQ(coordinator.leaves.size(), 1u);
}

// The coordinator was started with another state file.
TEST_F(MembershipAgentTest, RefusedWithItsJobs_KeepsThemAndDoesNotJoinAgain) {
  v1::Assignment assignment;
  assignment.mutable_spec()->set_name("retained");
  coordinator.Assign(assignment);
  MembershipAgent agent(coordinator, worker, Identity());
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.last_heartbeat.jobs_size() == 1; }));
  coordinator.Answer(absl::OkStatus(), absl::FailedPreconditionError("job retained is in another state file"));
  EXPECT_TRUE(coordinator.AwaitMore(0, 3));
  agent.Stop();
  EXPECT_EQ(coordinator.joins_made, 1);
  EXPECT_EQ(worker.Statuses().size(), 1u);
}

TEST_F(MembershipAgentTest, NameTakenOrStale_IsToldToTheCaller) {
  const std::pair<absl::Status, Code> cases[] = {
      {absl::AlreadyExistsError("w1 is alive, incarnation 41"), Code::kAlreadyExists},
      {absl::AbortedError("incarnation 43 was seen"), Code::kAborted},
      {absl::InvalidArgumentError("address is empty"), Code::kInvalidArgument}};
  for (const auto& [answer, code] : cases) {
    coordinator.Answer(answer, absl::OkStatus());
    MembershipAgent agent(coordinator, worker, Identity());
    EXPECT_THAT(agent.AwaitJoined(kLong), StatusIs(code, HasSubstr(std::string(answer.message()))));
  }
}

// The wall clock was set back.
TEST_F(MembershipAgentTest, RefusedIncarnation_JoinsWithTheOneThatIsTaken) {
  coordinator.Answer(WithNextIncarnation(absl::AbortedError("incarnation 50 was seen"), 51), absl::OkStatus());
  v1::JoinRequest identity = Identity();
  identity.set_resumes(41);
  identity.add_resumed()->set_job("j");
  MembershipAgent agent(coordinator, worker, identity);
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.last_join.incarnation() == 51; }));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  ASSERT_OK(agent.AwaitJoined(kLong));
  EXPECT_EQ(agent.joined().incarnation, 51);
  EXPECT_EQ(agent.joined().heartbeat_timeout, absl::Milliseconds(1234));
  EXPECT_TRUE(coordinator.AwaitMore(0, 2));
  agent.Stop();
  EXPECT_EQ(coordinator.last_join.resumes(), 41);
  EXPECT_EQ(coordinator.last_join.resumed_size(), 1);
  EXPECT_EQ(coordinator.last_heartbeat.incarnation(), 51);
  EXPECT_EQ(coordinator.leaves.at(0).incarnation(), 51);
}

// Somebody joined in its place, who is silent now: what it was to take over once is no incarnation's of its own any
// more.
TEST_F(MembershipAgentTest, ThrownOut_JoinsAgainAsANewIncarnation) {
  v1::JoinRequest identity = Identity();
  identity.set_dead_incarnation(41);
  identity.set_resumes(41);
  identity.add_resumed()->set_job("j");
  MembershipAgent agent(coordinator, worker, identity);
  ASSERT_OK(agent.AwaitJoined(kLong));
  coordinator.Answer(absl::AlreadyExistsError("w1 is alive"),
                     WithNextIncarnation(absl::AbortedError("incarnation 42 is stale"), 61));
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.last_join.incarnation() == 61; }));
  EXPECT_TRUE(coordinator.AwaitMore(2, 0));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.last_heartbeat.incarnation() == 61; }));
  agent.Stop();
  EXPECT_EQ(coordinator.last_join.dead_incarnation(), 0);
  EXPECT_EQ(coordinator.last_join.resumes(), 0);
  EXPECT_EQ(coordinator.last_join.resumed_size(), 0);
}

TEST_F(MembershipAgentTest, Secret_IsTheSameInAllCallsOfAnIncarnation_AndAnotherInTheNext) {
  coordinator.Answer(absl::UnavailableError("not yet"), absl::OkStatus());
  MembershipAgent agent(coordinator, worker, Identity());
  EXPECT_TRUE(coordinator.AwaitMore(2, 0));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  EXPECT_TRUE(coordinator.AwaitMore(0, 2));
  coordinator.Answer(absl::OkStatus(), absl::NotFoundError("who?"));  // of an older state file
  EXPECT_TRUE(coordinator.AwaitMore(2, 2));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  coordinator.RefuseBelow(61);
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.last_join.incarnation() == 61; }));
  EXPECT_TRUE(coordinator.AwaitMore(0, 3));
  agent.Stop();
  std::map<int64_t, std::set<std::string>> secrets;
  for (const v1::JoinRequest& join : coordinator.joins) secrets[join.incarnation()].insert(join.secret());
  ASSERT_EQ(secrets.size(), 2u);
  for (const auto& [incarnation, of_incarnation] : secrets) {
    EXPECT_EQ(of_incarnation.size(), 1u) << incarnation;
    EXPECT_EQ(of_incarnation.begin()->size(), 16u) << incarnation;
  }
  const std::string first = *secrets[42].begin(), second = *secrets[61].begin();
  EXPECT_NE(first, second);
  EXPECT_EQ(std::set<std::string>(coordinator.beat_secrets.begin(), coordinator.beat_secrets.end()),
            (std::set<std::string>{first, second}));
  EXPECT_EQ(coordinator.last_heartbeat.secret(), second);
  EXPECT_EQ(coordinator.leaves.at(0).secret(), second);
}

TEST_F(MembershipAgentTest, Incarnations_HaveSecretsOfTheirOwn) {
  std::set<std::string> seen;
  for (int incarnation = 0; incarnation < 2; ++incarnation) {
    MembershipAgent agent(coordinator, worker, Identity());
    ASSERT_OK(agent.AwaitJoined(kLong));
    agent.Stop();
    EXPECT_TRUE(seen.insert(coordinator.last_join.secret()).second);
  }
}

// As with any other answer: it says so and asks again, as the same incarnation.
TEST_F(MembershipAgentTest, PermissionDenied_IsSaidAndAskedAgain) {
  const absl::Status denied = absl::PermissionDeniedError("heartbeat of worker w1 without the secret");
  coordinator.Answer(denied, denied);
  MembershipAgent agent(coordinator, worker, Identity());
  EXPECT_TRUE(coordinator.AwaitMore(2, 0));
  EXPECT_THAT(agent.AwaitJoined(absl::Milliseconds(1)),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("without the secret")));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  ASSERT_OK(agent.AwaitJoined(kLong));
  coordinator.Answer(denied, denied);
  EXPECT_TRUE(coordinator.AwaitMore(0, 2));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  EXPECT_TRUE(coordinator.AwaitMore(0, 2));
  agent.Stop();
  EXPECT_EQ(coordinator.last_heartbeat.incarnation(), 42);
  EXPECT_EQ(std::set<std::string>(coordinator.beat_secrets.begin(), coordinator.beat_secrets.end()).size(), 1u);
}

// Another program has joined as this incarnation: the worker is the next one.
TEST_F(MembershipAgentTest, PermissionDenied_WithTheNextIncarnation_TakesThat) {
  const absl::Status taken = WithNextIncarnation(absl::PermissionDeniedError("without the secret"), 43);
  coordinator.Answer(taken, absl::OkStatus());
  MembershipAgent agent(coordinator, worker, Identity());
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) { return c.last_join.incarnation() == 43; }));
  coordinator.Answer(absl::OkStatus(), absl::OkStatus());
  ASSERT_OK(agent.AwaitJoined(kLong));
  agent.Stop();
}

// What is assigned is held, and how it is goes back with the next heartbeat, at once.
TEST_F(MembershipAgentTest, Assignments_ReachTheWorker_AndStatusesGoBack) {
  v1::Assignment assignment;
  assignment.mutable_spec()->set_name("bad");  // a job that cannot be built: no mesh, no parameters
  assignment.set_epoch(3);
  coordinator.Assign(assignment);
  MembershipAgent agent(coordinator, worker, Identity());
  EXPECT_TRUE(coordinator.Await([](const FakeCoordinator& c) {
    return c.last_heartbeat.jobs_size() == 1 && c.last_heartbeat.jobs(0).state() == v1::MEMBER_STATE_FAILED;
  }));
  agent.Stop();
  const v1::MemberStatus& status = coordinator.last_heartbeat.jobs(0);
  EXPECT_EQ(status.job(), "bad");
  EXPECT_EQ(status.epoch(), 3);
  EXPECT_THAT(status.error(), HasSubstr("worker w1 could not prepare it"));
}

}  // namespace
}  // namespace shardmesh
