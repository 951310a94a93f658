#include "worker/relay/relayed_coordinator.h"

#include <utility>

#include "core/base/incarnation.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Answers heartbeats as told; joins, with the time-out.
struct Answers {
  absl::Status heartbeat;
  int heartbeats = 0;
  absl::Duration given;  // to the last of them
  int64_t timeout_ms = 2000;
};

#define SHARDMESH_UNUSED(name, Request, Reply)                          \
  absl::StatusOr<Reply> name(const Request&, absl::Duration) override { \
    return absl::UnimplementedError("no test calls it");                \
  }

class FakeTransport final : public CoordinatorTransport {
 public:
  explicit FakeTransport(Answers& answers) : answers_(answers) {}
  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest&, absl::Duration) override {
    v1::JoinReply reply;
    reply.set_heartbeat_timeout_ms(answers_.timeout_ms);
    return reply;
  }
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest&, absl::Duration timeout) override {
    ++answers_.heartbeats;
    answers_.given = timeout;
    if (!answers_.heartbeat.ok()) return answers_.heartbeat;
    return v1::HeartbeatReply();
  }
  SHARDMESH_UNUSED(CreateJob, v1::CreateJobRequest, v1::CreateJobReply)
  SHARDMESH_UNUSED(DescribeJob, v1::DescribeJobRequest, v1::JobDescription)
  SHARDMESH_UNUSED(ListJobs, v1::ListJobsRequest, v1::ListJobsReply)
  SHARDMESH_UNUSED(DeleteJob, v1::DeleteJobRequest, v1::DeleteJobReply)
  SHARDMESH_UNUSED(ReshardJob, v1::ReshardJobRequest, v1::JobDescription)
  SHARDMESH_UNUSED(RecordCheckpoint, v1::RecordCheckpointRequest, v1::RecordCheckpointReply)
  SHARDMESH_UNUSED(ResolveNames, v1::ResolveNamesRequest, v1::ResolveNamesReply)
  SHARDMESH_UNUSED(GetPlan, v1::GetPlanRequest, v1::GetPlanReply)
  SHARDMESH_UNUSED(ListVersions, v1::ListVersionsRequest, v1::ListVersionsReply)
  SHARDMESH_UNUSED(Leave, v1::LeaveRequest, v1::LeaveReply)

 private:
  Answers& answers_;
};
#undef SHARDMESH_UNUSED

class RelayedTest : public ::testing::Test {
 protected:
  absl::Status Beat() { return relayed_.Heartbeat({}, absl::Seconds(2)).status(); }

  Answers direct_, relay_;
  int lost_ = 0;
  RelayedCoordinator relayed_{"w", std::make_unique<FakeTransport>(direct_), std::make_unique<FakeTransport>(relay_),
                              [this] { ++lost_; }};
};

TEST_F(RelayedTest, HeartbeatsGoToTheRelay_WithPartOfTheTimeout) {
  EXPECT_OK(Beat());
  EXPECT_EQ(relay_.heartbeats, 1);
  EXPECT_EQ(direct_.heartbeats, 0);
  EXPECT_EQ(relay_.given, absl::Seconds(1));
  ASSERT_OK(relayed_.Join({}, absl::Seconds(2)));
  EXPECT_OK(Beat());
  EXPECT_EQ(relay_.given, absl::Seconds(2) / 6) << "part of the time-out that Join told";
}

TEST_F(RelayedTest, TheRelayDoesNotAnswer_TheCoordinatorIsCalled_AndTheRelayIsLeftAloneForAWhile) {
  for (const Code code : {Code::kUnavailable, Code::kDeadlineExceeded, Code::kUnimplemented, Code::kInternal,
                          Code::kPermissionDenied, Code::kAborted, Code::kInvalidArgument, Code::kUnauthenticated}) {
    Answers direct, relay;
    lost_ = 0;
    RelayedCoordinator relayed("w", std::make_unique<FakeTransport>(direct), std::make_unique<FakeTransport>(relay),
                               [this] { ++lost_; });
    relay.heartbeat = absl::Status(code, "the relay");
    EXPECT_OK(relayed.Heartbeat({}, absl::Seconds(2)));
    EXPECT_OK(relayed.Heartbeat({}, absl::Seconds(2)));
    EXPECT_EQ(relay.heartbeats, 1) << code;
    EXPECT_EQ(direct.heartbeats, 2) << code;
    EXPECT_EQ(lost_, 1) << code;
  }
}

TEST_F(RelayedTest, TheCoordinatorRefuses_ThatIsTheAnswer) {
  for (const absl::Status& refusal :
       {WithNextIncarnation(absl::AbortedError("stale"), 9), absl::NotFoundError("it has not joined"),
        WithNextIncarnation(absl::PermissionDeniedError("another secret"), 9),
        absl::FailedPreconditionError("another state file")}) {
    relay_.heartbeat = refusal;
    EXPECT_EQ(Beat(), refusal);
  }
  EXPECT_EQ(direct_.heartbeats, 0);
  EXPECT_EQ(lost_, 0);
}

}  // namespace
}  // namespace shardmesh
