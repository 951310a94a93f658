// Contract: who speaks in a worker's name can disturb it, but not for ever. A live worker that was thrown out joins
// again and serves new jobs; no name is blocked; and a step that was never committed is not believed for long.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "core/clock.h"
#include "core/incarnation.h"
#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kCall = absl::Seconds(10), kLong = absl::Seconds(60);

struct ForgedWorker : ::testing::Test {
  void SetUp() override {
    ClusterOptions options;
    options.workers = 1;
    options.heartbeat_timeout = absl::Seconds(2);
    ASSERT_OK_AND_ASSIGN(cluster, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client connected, cluster->Connect());
    client = std::make_unique<Client>(std::move(connected));
    ASSERT_OK_AND_ASSIGN(job, client->CreateJob(testing::TinyJob("job", "fsdp=1", 1)));
    ASSERT_OK(testing::Initialize(*job));
    member = job->members()[0];
    stranger.set_name(member.worker());
    stranger.set_incarnation(member.incarnation() + 1);
    stranger.set_address("127.0.0.1:9");
    stranger.set_host_id(member.host_id());
    stranger.set_local_socket("/nowhere");
    stranger.set_pid(1);
  }
  // A new job is made, trained and deleted, by a worker that really is there.
  void ExpectServesANewJob() {
    const absl::Time deadline = MonotonicNow() + kLong;
    absl::StatusOr<testing::Learnt> learnt;
    for (int attempt = 0; MonotonicNow() < deadline; ++attempt) {
      const std::string name = absl::StrCat("new-", attempt);
      learnt = testing::Undisturbed(*client, testing::TinyJob(name, "fsdp=1", 1), 2);
      if (learnt.ok()) return;
      testing::Delete(*client, name).IgnoreError();
    }
    FAIL() << learnt.status();
  }
  int64_t CommittedStep() const {
    v1::ListVersionsRequest request;
    request.set_job("job");
    const auto reply = client->coordinator().ListVersions(request, kCall);
    return reply.ok() ? reply->committed_step() : -100;
  }

  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<Client> client;
  std::shared_ptr<Job> job;
  v1::Member member;
  v1::JoinRequest stranger;
};

TEST_F(ForgedWorker, JoinsInThePlaceOfALiveOne_WhichComesBackAndServesNewJobs) {
  stranger.set_dead_incarnation(member.incarnation());
  ASSERT_OK(client->coordinator().Join(stranger, kCall));
  ExpectServesANewJob();
  EXPECT_TRUE(cluster->worker("w0").alive());
}

TEST_F(ForgedWorker, LeavesForALiveOne_WhichComesBackAndServesNewJobs) {
  v1::LeaveRequest leave;
  leave.set_name(member.worker());
  leave.set_incarnation(member.incarnation());
  ASSERT_OK(client->coordinator().Leave(leave, kCall));
  ExpectServesANewJob();
}

TEST_F(ForgedWorker, JoinsWithTheLargestIncarnation_AndTheNameIsNotBlocked) {
  stranger.set_incarnation(std::numeric_limits<int64_t>::max());
  for (const char* const name : {"w0", "w1"}) {
    stranger.set_name(name);
    if (stranger.name() == member.worker()) stranger.set_dead_incarnation(member.incarnation());
    const absl::Status refused = client->coordinator().Join(stranger, kCall).status();
    EXPECT_THAT(refused, StatusIs(Code::kAborted, HasSubstr("too far ahead")));
    EXPECT_NE(NextIncarnationOf(refused), std::nullopt);
  }
  // As far ahead as it may be.
  stranger.set_name("w1");
  stranger.set_incarnation(absl::ToUnixNanos(absl::Now() + absl::Hours(23)));
  ASSERT_OK(client->coordinator().Join(stranger, kCall));
  ASSERT_OK(cluster->StartWorker("w1"));
  cluster->coordinator().Kill9();
  ASSERT_OK(cluster->RestartCoordinator());
  cluster->worker("w1").Kill9();
  ASSERT_OK(cluster->StartWorker("w1"));
}

TEST_F(ForgedWorker, ReportsAStepThatNeverWas_AndTheTrueOneIsKnownSoon) {
  v1::HeartbeatRequest forged;
  forged.set_name(member.worker());
  forged.set_incarnation(member.incarnation());
  v1::MemberStatus& status = *forged.add_jobs();
  status.set_job("job");
  status.set_epoch(job->epoch().value());
  status.set_state(v1::MEMBER_STATE_READY);
  status.set_plan_hash(job->plan().hash());
  status.set_committed_step(int64_t{1} << 62);  // no job can be there
  EXPECT_THAT(client->coordinator().Heartbeat(forged, kCall),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr("committed_step")));
  forged.mutable_jobs(0)->set_committed_step(int64_t{1} << 38);
  ASSERT_OK(client->coordinator().Heartbeat(forged, kCall));
  const absl::Time deadline = MonotonicNow() + kLong;
  while (CommittedStep() != 0 && MonotonicNow() < deadline) poll(nullptr, 0, 20);
  EXPECT_EQ(CommittedStep(), 0);
}

}  // namespace
}  // namespace shardmesh
