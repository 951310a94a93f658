// Where a worker's next incarnation meets other things that die, end or take their time: what goes on, and what ends,
// in time and with a reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/await.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Await;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Process;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(8);
constexpr absl::Duration kLong = absl::Seconds(30);

class RestartLimits : public ::testing::Test {
 protected:
  void SetUp() override {
    ClusterOptions options;
    options.workers = 2;
    options.retained = true;
    options.heartbeat_timeout = kHeartbeatTimeout;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(Spec()));
    ASSERT_OK(testing::Initialize(*job_));
  }
  static JobSpec Spec() { return testing::OddJob("job", "fsdp=2", 2); }

  absl::StatusOr<std::unique_ptr<Session>> Attach(std::vector<Slot> slots) {
    ASSIGN_OR_RETURN(std::unique_ptr<Session> session, job_->Attach(std::move(slots)));
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    return session;
  }

  // The worker that an attached session of slot 0 is attached to.
  std::string Host() const { return job_->members()[0].worker(); }
  // Killed, and there again as another process.
  void KillAndAwait(const std::string& name) {
    const pid_t pid = cluster_->PidOf(name);
    ASSERT_GT(pid, 0);
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_GT(cluster_->AwaitNextIncarnation(name, pid, kLong), 0);
  }

  int JoinsOf(const std::string& name) const {
    const std::string log = cluster_->node().Log(), joined = absl::StrCat("event=joined worker=", name, " ");
    int joins = 0;
    for (size_t at = log.find(joined); at != std::string::npos; at = log.find(joined, at + 1)) ++joins;
    return joins;
  }

  // Descriptors of memory of jobs that the node has.
  int RetainedByNode() const {
    int retained = 0;
    std::error_code error;
    for (const auto& fd :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", cluster_->node().pid(), "/fd"), error)) {
      retained += absl::StrContains(std::filesystem::read_symlink(fd, error).string(), "memfd:");
    }
    return retained;
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
};

TEST_F(RestartLimits, ATrainerThatComputesForLongerThanTheTimeOut_GoesOn) {
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 2));
  for (const char* name : {"w-0", "w-1"}) ASSERT_NO_FATAL_FAILURE(KillAndAwait(name));
  const absl::Time until = MonotonicNow() + kHeartbeatTimeout + absl::Seconds(1);
  while (MonotonicNow() < until) testing::Pause(absl::Milliseconds(100));
  ASSERT_OK(testing::TrainTo(*session, 4));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, 4));
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, Spec(), 4));
  EXPECT_EQ(learnt, undisturbed);
}

TEST_F(RestartLimits, AWorkersStatus_SaysHowOftenItCameBack_AndHowLongThatTook) {
  const auto status = [&](int rank) -> absl::StatusOr<v1::GetStatusReply::Job> {
    ASSIGN_OR_RETURN(const v1::GetStatusReply reply, job_->worker(Rank(rank)).GetStatus(kLong));
    return reply.jobs_size() == 1 ? reply.jobs(0) : v1::GetStatusReply::Job();
  };
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  const std::string name = job_->members()[1].worker();
  for (int64_t time = 1; time <= 3; ++time) {
    const absl::Time begin = MonotonicNow();
    ASSERT_NO_FATAL_FAILURE(KillAndAwait(name));
    ASSERT_OK(testing::TrainTo(*session, time));
    absl::StatusOr<v1::GetStatusReply::Job> said = absl::UnavailableError("");  // until its new address is served
    ASSERT_TRUE(Await([&] { return (said = status(1)).ok() && said->restarts() > 0; }));
    EXPECT_EQ(said->restarts(), time);
    EXPECT_GT(said->last_pause_nanos(), 0);
    EXPECT_LT(absl::Nanoseconds(said->last_pause_nanos()), MonotonicNow() - begin);
  }
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply::Job other, status(0));
  EXPECT_EQ(other.restarts(), 0);
  EXPECT_FALSE(other.has_last_pause_nanos());
}

// Its process lives, so the next incarnation waits for its session; but it says itself that it begins another.
TEST_F(RestartLimits, ATrainerThatEndsItsSessionWhileTheWorkerIsAway_AttachesAnew) {
  ASSERT_OK_AND_ASSIGN(auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 2));
  const pid_t pid = cluster_->PidOf(Host());
  ASSERT_EQ(kill(pid, SIGSTOP), 0);  // it does not see that the trainer hangs up
  session.reset();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_GT(cluster_->AwaitNextIncarnation(Host(), pid, kLong), 0);
  ASSERT_OK_AND_ASSIGN(session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 4));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, 4));
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, Spec(), 4));
  EXPECT_EQ(learnt, undisturbed);
}

TEST_F(RestartLimits, AJobWithTheLongestName_IsKept) {
  const JobSpec spec = testing::OddJob(std::string(kMaxIdBytes, 'x'), "fsdp=2", 2);
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job_));
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_NO_FATAL_FAILURE(KillAndAwait("w-1"));
  ASSERT_OK(testing::TrainTo(*session, 2));
}

TEST_F(RestartLimits, AWorkerThatIsToldToStop_Leaves) {
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 2));
  const pid_t pid = cluster_->PidOf("w-1");
  ASSERT_EQ(kill(pid, SIGTERM), 0);
  absl::Status trained;
  for (int64_t step = 3; trained.ok() && step < 100'000; ++step) trained = testing::TrainTo(*session, step);
  EXPECT_THAT(trained, StatusIs(Code::kUnavailable, HasSubstr("w-1")));
  ASSERT_TRUE(Await([&] { return absl::StrContains(cluster_->node().Log(), "worker=w-1"); }));
  EXPECT_EQ(cluster_->AwaitNextIncarnation("w-1", pid, absl::Seconds(1)), 0);
}

TEST_F(RestartLimits, ANodeAndAWorkerKilledTogether_TheJobEndsInTime_AndTheNextOneRuns) {
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 2));
  cluster_->node().Kill9();
  const pid_t pid = cluster_->PidOf("w-1");
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  const absl::Time begin = MonotonicNow();
  EXPECT_THAT(testing::TrainTo(*session, 3), StatusIs(Code::kUnavailable, HasSubstr("w-1")));
  EXPECT_LT(MonotonicNow() - begin, 2 * kHeartbeatTimeout);
  ASSERT_OK(cluster_->StartNode());
  // The coordinator knows of the next incarnation, and gives the new job to that one.
  ASSERT_TRUE(Await([&] { return JoinsOf("w-1") == 2; }));
  ASSERT_OK(testing::Delete(*client_, "job"));
  EXPECT_OK(testing::Undisturbed(*client_, Spec(), 4).status());
}

TEST_F(RestartLimits, ANodeThatCameBack_KeepsWhatItIsGivenAnew) {
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 2));
  const int retained = RetainedByNode();
  EXPECT_GT(retained, 8);
  // The next incarnations, too, give all anew: also what they found.
  for (int round = 0; round < 2; ++round) {
    const pid_t before[] = {cluster_->PidOf("w-0"), cluster_->PidOf("w-1")};
    cluster_->node().Kill9();
    ASSERT_OK(testing::TrainTo(*session, 3 + 4 * round));  // nothing waits for a node
    ASSERT_OK(cluster_->StartNodeAgain(kLong));
    EXPECT_GE(RetainedByNode(), retained);
    EXPECT_EQ(cluster_->PidOf("w-0"), before[0]);
    EXPECT_EQ(cluster_->PidOf("w-1"), before[1]);
    for (const char* name : {"w-0", "w-1"}) ASSERT_NO_FATAL_FAILURE(KillAndAwait(name));
    ASSERT_OK(testing::TrainTo(*session, 6 + 4 * round));
  }
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, 10));
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, Spec(), 10));
  EXPECT_EQ(learnt, undisturbed);
}

TEST_F(RestartLimits, ADeletedJobsMemoryIsGone_AlsoOfOneThatWasTakenOver) {
  EXPECT_GT(RetainedByNode(), 8);
  ASSERT_OK(testing::Delete(*client_, "job"));
  EXPECT_TRUE(Await([&] { return RetainedByNode() == 0; })) << RetainedByNode();
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(Spec()));
  ASSERT_OK(testing::Initialize(*job_));
  ASSERT_OK_AND_ASSIGN(auto session, Attach({Slot(0), Slot(1)}));
  for (const char* name : {"w-0", "w-1"}) ASSERT_NO_FATAL_FAILURE(KillAndAwait(name));
  ASSERT_OK(testing::TrainTo(*session, 2));
  session.reset();
  ASSERT_OK(testing::Delete(*client_, "job"));
  EXPECT_TRUE(Await([&] { return RetainedByNode() == 0; })) << RetainedByNode();
}

TEST_F(RestartLimits, TheCoordinatorDiesWithTheWorker_TheJobGoesOnWithoutIt) {
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 2));
  cluster_->coordinator().Kill9();
  for (const char* name : {"w-0", "w-1"}) ASSERT_NO_FATAL_FAILURE(KillAndAwait(name));
  ASSERT_OK(testing::TrainTo(*session, 6));
  ASSERT_OK(cluster_->RestartCoordinator());
  ASSERT_OK(testing::TrainTo(*session, 8));
  ASSERT_TRUE(Await([&] {  // the next incarnations are the job's members there
    v1::DescribeJobRequest request;
    request.set_job("job");
    const auto described = client_->coordinator().DescribeJob(request, kLong);
    return described.ok() && described->members(0).pid() == cluster_->PidOf("w-0") &&
           described->members(1).pid() == cluster_->PidOf("w-1") && described->state() == v1::JOB_STATE_READY;
  }));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, 8));
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, Spec(), 8));
  EXPECT_EQ(learnt, undisturbed);
}

TEST_F(RestartLimits, AWorkerThatDoesNotFindTheCoordinator_EndsAtOnceWhenToldTo) {
  cluster_->coordinator().Kill9();
  ASSERT_NO_FATAL_FAILURE(KillAndAwait("w-1"));
  const pid_t pid = cluster_->PidOf("w-1");
  // It has taken the job over, and asks for the coordinator.
  ASSERT_TRUE(Await([&] { return absl::StrContains(cluster_->node().Log(), "event=coordinator_error worker=w-1"); }));
  ASSERT_EQ(kill(pid, SIGTERM), 0);
  EXPECT_TRUE(Await([&] { return cluster_->PidOf("w-1") != pid; })) << "it still runs";
}

TEST_F(RestartLimits, ReadersOnlyWait) {
  ASSERT_OK_AND_ASSIGN(const auto session, Attach({Slot(0), Slot(1)}));
  ASSERT_OK(testing::TrainTo(*session, 3));
  ASSERT_OK_AND_ASSIGN(const Learnt before, testing::Learn(*job_, 3));
  const std::string reads_from = job_->members()[job_->reading_rank().value()].worker();
  ASSERT_EQ(kill(cluster_->PidOf(reads_from), SIGKILL), 0);
  ASSERT_OK_AND_ASSIGN(const Learnt after, testing::Learn(*job_, 3));
  EXPECT_EQ(before, after);
}

// A node retains 64 jobs of a worker. The 65th trains without it.
TEST_F(RestartLimits, MoreJobsThanANodeRetains_TrainAndEndWithTheWorker) {
  for (int i = 1; i < 64; ++i)
    ASSERT_OK(client_->CreateJob(testing::TinyJob(absl::StrCat("more-", i), "fsdp=2", 1, 8)));
  ASSERT_OK_AND_ASSIGN(const auto last, client_->CreateJob(testing::TinyJob("last", "fsdp=2", 1, 8)));
  EXPECT_THAT(cluster_->node().Log(), HasSubstr("event=not_retained worker=w-0 job=last"));
  ASSERT_OK(testing::Initialize(*last));
  ASSERT_OK_AND_ASSIGN(const auto session, last->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  EXPECT_OK(session->Step().status());
}

}  // namespace
}  // namespace shardmesh
