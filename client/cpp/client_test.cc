// Opening and awaiting jobs, against a coordinator in the test's own process.
#include "client/cpp/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cpp/transport/fake_coordinator.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::NiceMock;
using ::testing::Return;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(20);
constexpr absl::Duration kShort = absl::Milliseconds(50);

// A job of two workers in this state.
v1::JobDescription Described(v1::JobState state) {
  JobSpec spec;
  spec.name = "j";
  spec.mesh = ParseMeshSpec("fsdp=2").value();
  spec.parameters = {{"w", {100}, WeightFormat::kFp32, ""}};
  v1::JobDescription job;
  *job.mutable_spec() = ToProto(spec);
  job.set_state(state);
  job.set_plan_hash(Plan::Create(spec).value().hash());
  for (int rank = 0; rank < 2; ++rank) {
    v1::Member* member = job.add_members();
    member->set_rank(rank);
    member->set_worker(absl::StrCat("w", rank));
    member->set_address("127.0.0.1:1");  // nobody serves there
    member->set_alive(true);
    member->set_ready(state == v1::JOB_STATE_READY || rank == 0);
  }
  return job;
}

v1::JobDescription Waiting() {
  v1::JobDescription job = Described(v1::JOB_STATE_WAITING);
  job.clear_members();
  job.set_waiting_for("2 live workers on one host; host h1 has 1");
  return job;
}

class ClientTest : public ::testing::Test {
 protected:
  static ClientOptions Options() {
    ClientOptions options;
    options.ready_timeout = kShort;
    return options;
  }

  std::shared_ptr<NiceMock<FakeCoordinator>> coordinator_ = std::make_shared<NiceMock<FakeCoordinator>>();
  Client client_{coordinator_, Options()};
};

TEST_F(ClientTest, AwaitJob_CreatedLater_OpensItOnceItIsReady) {
  EXPECT_CALL(*coordinator_, DescribeJob(_, _))
      .WillOnce(Return(absl::NotFoundError("no job j")))
      .WillOnce(Return(absl::NotFoundError("no job j")))
      .WillOnce(Return(Waiting()))
      .WillOnce(Return(Described(v1::JOB_STATE_PREPARING)))
      .WillOnce(Return(Described(v1::JOB_STATE_READY)));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_.AwaitJob("j", kLong));
  EXPECT_EQ(job->spec().name, "j");
}

TEST_F(ClientTest, AwaitJob_NeverCreated_EndsAtItsTimeout) {
  ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(absl::NotFoundError("no job j")));
  const absl::Time start = MonotonicNow();
  EXPECT_THAT(client_.AwaitJob("j", kShort),
              StatusIs(Code::kDeadlineExceeded, AllOf(HasSubstr("job j was not ready within 50ms"),
                                                      HasSubstr("it waits for somebody to create it"))));
  EXPECT_GE(MonotonicNow() - start, kShort);
}

TEST_F(ClientTest, AwaitJob_OtherErrors_AreNotWaitedFor) {
  EXPECT_CALL(*coordinator_, DescribeJob(_, _)).WillOnce(Return(absl::UnavailableError("coordinator is gone")));
  EXPECT_THAT(client_.AwaitJob("j", kLong), StatusIs(Code::kUnavailable, HasSubstr("coordinator is gone")));
}

TEST_F(ClientTest, OpenJob_Absent_IsNotWaitedFor) {
  EXPECT_CALL(*coordinator_, DescribeJob(_, _)).WillOnce(Return(absl::NotFoundError("no job j")));
  EXPECT_THAT(client_.OpenJob("j"), StatusIs(Code::kNotFound, HasSubstr("no job j")));
}

TEST_F(ClientTest, OpenJob_NotReadyInTime_SaysWhatIsWaitedFor) {
  ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(Waiting()));
  EXPECT_THAT(client_.OpenJob("j"),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("not ready within 50ms; it waits for 2 live workers on one "
                                                          "host; host h1 has 1")));
  ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(Described(v1::JOB_STATE_PREPARING)));
  EXPECT_THAT(client_.OpenJob("j"),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("it waits for memory to be built by w1")));
}

TEST_F(ClientTest, OpenJob_Failed_IsUnavailable_AndCannotBeReadWithoutAWorker) {
  v1::JobDescription failed = Described(v1::JOB_STATE_FAILED);
  failed.set_error("worker w1 (rank 1) died");
  ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(failed));
  EXPECT_THAT(client_.OpenJob("j"), StatusIs(Code::kUnavailable, HasSubstr("job j failed: worker w1 (rank 1) died")));
  EXPECT_THAT(client_.OpenJob("j", {}, JobUse::kRead),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("none of the workers of job j answers"),
                                                 HasSubstr("it failed: worker w1 (rank 1) died"))));
}

// A job of members that a node keeps.
v1::JobDescription Kept(int64_t epoch) {
  v1::JobDescription job = Described(v1::JOB_STATE_READY);
  job.set_epoch(epoch);
  job.set_heartbeat_timeout_ms(absl::ToInt64Milliseconds(kLong));
  for (v1::Member& member : *job.mutable_members()) member.set_kept(true);
  return job;
}

v1::ListVersionsReply AtEpoch(int64_t epoch) {
  v1::ListVersionsReply reply;
  reply.set_epoch(epoch);
  return reply;
}

TEST_F(ClientTest, CallAgain_EpochIsOver_DoesNotWaitForAMember) {
  ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(Kept(3)));
  for (const absl::StatusOr<v1::ListVersionsReply>& now :
       {absl::StatusOr<v1::ListVersionsReply>(AtEpoch(4)),
        absl::StatusOr<v1::ListVersionsReply>(absl::NotFoundError(""))}) {
    ON_CALL(*coordinator_, ListVersions(_, _)).WillByDefault(Return(now));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_.OpenJob("j"));
    int calls = 0;
    const auto call = [&] { return ++calls, absl::UnavailableError("away"); };
    EXPECT_THAT(CallAgain(*job, Rank(1), absl::InfiniteDuration(), call), StatusIs(Code::kUnavailable, "away"));
    EXPECT_EQ(calls, 1);
  }
}

TEST_F(ClientTest, CallAgain_CoordinatorIsAwayOrSaysTheSameEpoch_WaitsForAMember) {
  ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(Kept(3)));
  for (const absl::StatusOr<v1::ListVersionsReply>& now :
       {absl::StatusOr<v1::ListVersionsReply>(AtEpoch(3)),
        absl::StatusOr<v1::ListVersionsReply>(absl::UnavailableError(""))}) {
    // It is asked now and then, not at each call.
    EXPECT_CALL(*coordinator_, ListVersions(_, _)).WillOnce(Return(now));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_.OpenJob("j"));
    int calls = 0;
    const auto call = [&] { return ++calls < 3 ? absl::UnavailableError("away") : absl::OkStatus(); };
    EXPECT_OK(CallAgain(*job, Rank(1), absl::InfiniteDuration(), call));
    EXPECT_EQ(calls, 3);
  }
}

TEST(WaitsForTest, ManyWorkers_NamesTheFirst) {
  v1::JobDescription job;
  job.set_state(v1::JOB_STATE_PREPARING);
  for (int rank = 0; rank < 10; ++rank) job.add_members()->set_worker(absl::StrCat("w", rank));
  EXPECT_EQ(WaitsFor(job), "memory to be built by w0, w1, w2, w3, w4, w5, w6, w7 and 2 more");
}

}  // namespace
}  // namespace shardmesh
