// Contract: who does not know a worker's secret can neither report nor leave for it, and who does not know a job's can
// not ask for what its members give each other. Who joins in a worker's name can disturb it, but not for ever: one that
// was thrown out joins again and serves new jobs, and no name is blocked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/shard_transport.h"
#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

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
  // What the live member could report of its job.
  v1::HeartbeatRequest Report(v1::MemberState state) const {
    v1::HeartbeatRequest request;
    request.set_name(member.worker());
    request.set_incarnation(member.incarnation());
    v1::MemberStatus& status = *request.add_jobs();
    status.set_job("job");
    status.set_epoch(job->epoch().value());
    status.set_state(state);
    status.set_plan_hash(job->plan().hash());
    return request;
  }
  // The job is READY with its first member, at its first epoch, and trains.
  void ExpectUndisturbed() {
    v1::DescribeJobRequest request;
    request.set_job("job");
    ASSERT_OK_AND_ASSIGN(const v1::JobDescription now, client->coordinator().DescribeJob(request, kCall));
    EXPECT_EQ(now.state(), v1::JOB_STATE_READY) << now.error();
    EXPECT_EQ(now.epoch(), job->epoch().value());
    EXPECT_EQ(now.members(0).incarnation(), member.incarnation());
    ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
    ASSERT_OK(session->AwaitWeights(kLong));
    EXPECT_OK(testing::TrainTo(*session, 2));
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

// It is believed, since a worker without a node could not come back at once otherwise; its job is lost.
TEST_F(ForgedWorker, JoinsInThePlaceOfALiveOne_WhichComesBackAndServesNewJobs) {
  stranger.set_dead_incarnation(member.incarnation());
  ASSERT_OK(client->coordinator().Join(stranger, kCall));
  ExpectServesANewJob();
  EXPECT_TRUE(cluster->worker("w0").alive());
}

TEST_F(ForgedWorker, JoinsAsTheLiveOne_IsToldNothing) {
  stranger.set_incarnation(member.incarnation());
  for (const char* const secret : {"", "guessed"}) {
    stranger.set_secret(secret);
    const absl::Status refused = client->coordinator().Join(stranger, kCall).status();
    EXPECT_THAT(refused, StatusIs(Code::kPermissionDenied, HasSubstr("without the secret that it joined with")));
    EXPECT_EQ(NextIncarnationOf(refused), member.incarnation() + 1) << "what the caller's number makes known, no more";
  }
  ExpectUndisturbed();
}

TEST_F(ForgedWorker, LeavesForALiveOne_IsRefused_AndItsJobGoesOn) {
  v1::LeaveRequest leave;
  leave.set_name(member.worker());
  leave.set_incarnation(member.incarnation());
  for (const char* const secret : {"", "guessed"}) {
    leave.set_secret(secret);
    EXPECT_THAT(client->coordinator().Leave(leave, kCall),
                StatusIs(Code::kPermissionDenied, HasSubstr("leave of worker w0")));
  }
  ExpectUndisturbed();
}

TEST_F(ForgedWorker, ReportsThatALiveOneFailed_IsRefused_AndItsJobGoesOn) {
  v1::HeartbeatRequest forged = Report(v1::MEMBER_STATE_FAILED);
  forged.mutable_jobs(0)->set_error("forged");
  for (const char* const secret : {"", "guessed"}) {
    forged.set_secret(secret);
    EXPECT_THAT(client->coordinator().Heartbeat(forged, kCall),
                StatusIs(Code::kPermissionDenied, HasSubstr("heartbeat of worker w0")));
  }
  ExpectUndisturbed();
}

TEST_F(ForgedWorker, AsksAsAMember_IsRefused_AndTheJobGoesOn) {
  ASSERT_OK_AND_ASSIGN(const auto worker, ShardTransport::Dial(member, TlsOptions(), kCall));
  v1::MeetRequest meet;
  meet.set_job("job");
  meet.set_epoch(job->epoch().value());
  meet.set_rank(0);
  meet.set_incarnation(member.incarnation());
  meet.set_plan_hash(job->plan().hash());
  meet.set_key("rounds/news/1");
  v1::TransferRequest transfer;
  transfer.set_job("job");
  transfer.set_epoch(job->epoch().value());
  transfer.set_mesh("fsdp=1");
  bool given = false;
  for (const char* const secret : {"", "guessed"}) {
    meet.set_secret(secret);
    transfer.set_secret(secret);
    EXPECT_THAT(worker->Meet(meet, kCall), StatusIs(Code::kPermissionDenied, HasSubstr("secret of job job")));
    EXPECT_THAT(worker->Transfer(
                    transfer, [&](const v1::TransferHeader&) { return given = true, absl::OkStatus(); },
                    [&](absl::string_view) { return given = true, absl::OkStatus(); }, kCall),
                StatusIs(Code::kPermissionDenied, HasSubstr("secret of job job")));
  }
  EXPECT_FALSE(given);
  ExpectUndisturbed();
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

TEST_F(ForgedWorker, ReportsAStepThatNeverWas_IsRefused) {
  v1::HeartbeatRequest forged = Report(v1::MEMBER_STATE_READY);
  forged.mutable_jobs(0)->set_committed_step(int64_t{1} << 62);  // no job can be there
  EXPECT_THAT(client->coordinator().Heartbeat(forged, kCall),
              StatusIs(Code::kInvalidArgument, HasSubstr("committed_step")));
  forged.mutable_jobs(0)->set_committed_step(int64_t{1} << 38);
  EXPECT_THAT(client->coordinator().Heartbeat(forged, kCall),
              StatusIs(Code::kPermissionDenied, HasSubstr("heartbeat of worker w0")));
  EXPECT_LE(CommittedStep(), 0);
  ExpectUndisturbed();
  const absl::Time deadline = MonotonicNow() + kLong;
  while (CommittedStep() != 2 && MonotonicNow() < deadline) poll(nullptr, 0, 20);
  EXPECT_EQ(CommittedStep(), 2);
}

}  // namespace
}  // namespace shardmesh
