// What waits at a worker that the job was continued without, while the worker's process runs on.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/fake_coordinator.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "proto/convert.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"

namespace shardmesh {
namespace {

using ::testing::_;
using ::testing::HasSubstr;
using ::testing::NiceMock;
using ::testing::Return;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(20);

// A worker that answers, by the number of the call, what it has of the job.
class AnsweringWorker final : public v1::Shard::Service {
 public:
  using Says = std::function<std::optional<v1::GetStatusReply::Job>(int call)>;

  explicit AnsweringWorker(Says says) : says_(std::move(says)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~AnsweringWorker() override { server_->Shutdown(); }

  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*, v1::GetStatusReply* reply) override {
    const std::optional<v1::GetStatusReply::Job> job = says_(++calls_);
    if (job.has_value()) *reply->add_jobs() = *job;
    return grpc::Status::OK;
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  const Says says_;
  std::atomic<int> calls_{0};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

v1::ListVersionsReply AtEpoch(int64_t epoch) {
  v1::ListVersionsReply reply;
  reply.set_epoch(epoch);
  return reply;
}

v1::GetStatusReply::Job Has(int64_t epoch, int64_t committed) {
  v1::GetStatusReply::Job job;
  job.set_name("j");
  job.set_epoch(epoch);
  job.set_committed_step(committed);
  return job;
}

class LeftOut : public ::testing::Test {
 protected:
  // Of two members that a node keeps.
  static v1::JobDescription Described(const AnsweringWorker& worker) {
    JobSpec spec;
    spec.name = "j";
    spec.mesh = ParseMeshSpec("fsdp=2").value();
    spec.parameters = {{"w", {100}, WeightFormat::kFp32, ""}};
    v1::JobDescription job;
    *job.mutable_spec() = ToProto(spec);
    job.set_state(v1::JOB_STATE_READY);
    job.set_epoch(3);
    job.set_plan_hash(Plan::Create(spec).value().hash());
    job.set_heartbeat_timeout_ms(absl::ToInt64Milliseconds(kLong));
    for (int rank = 0; rank < 2; ++rank) {
      v1::Member& member = *job.add_members();
      member.set_rank(rank);
      member.set_worker(absl::StrCat("w", rank));
      member.set_address(worker.address());
      member.set_alive(true);
      member.set_ready(true);
      member.set_kept(true);
    }
    return job;
  }
  absl::StatusOr<std::shared_ptr<Job>> Open(const v1::JobDescription& job) {
    ON_CALL(*coordinator_, DescribeJob(_, _)).WillByDefault(Return(job));
    return client_.OpenJob("j");
  }

  std::shared_ptr<NiceMock<FakeCoordinator>> coordinator_ = std::make_shared<NiceMock<FakeCoordinator>>();
  Client client_{coordinator_};
};

// A worker that was left out has nothing of the job. If it was not told yet, it has what it had.
TEST_F(LeftOut, AwaitCommittedStep_WorkerWasLeftOut_EndsOnceTheEpochIsOver) {
  for (const bool told : {true, false}) {
    const AnsweringWorker worker([told](int) { return told ? std::nullopt : std::make_optional(Has(3, -1)); });
    v1::JobDescription described = Described(worker);
    described.set_heartbeat_timeout_ms(500);
    EXPECT_CALL(*coordinator_, ListVersions(_, _)).WillOnce(Return(AtEpoch(3))).WillRepeatedly(Return(AtEpoch(4)));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Open(described));
    EXPECT_THAT(AwaitCommittedStep(*job, Rank(1), kLong),
                told ? StatusIs(Code::kUnavailable, HasSubstr("worker w1 does not hold job j any more"))
                     : StatusIs(Code::kAborted, HasSubstr("epoch 3 of job j is over, as the coordinator says")));
  }
}

TEST_F(LeftOut, AwaitCommittedStep_NextIncarnationWithoutTheJobYet_IsWaitedFor) {
  const AnsweringWorker worker(
      [](int call) { return call < 3 ? std::nullopt : std::make_optional(Has(3, call < 5 ? -1 : 7)); });
  EXPECT_CALL(*coordinator_, ListVersions(_, _)).WillOnce(Return(AtEpoch(3)));  // now and then
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Open(Described(worker)));
  ASSERT_OK_AND_ASSIGN(const Step step, AwaitCommittedStep(*job, Rank(1), kLong));
  EXPECT_EQ(step, Step(7));
}

TEST_F(LeftOut, AwaitCommittedStep_WeightsAreThere_AsksTheCoordinatorNothing) {
  const AnsweringWorker worker([](int) { return Has(3, 7); });
  EXPECT_CALL(*coordinator_, ListVersions(_, _)).Times(0);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Open(Described(worker)));
  ASSERT_OK_AND_ASSIGN(const Step step, AwaitCommittedStep(*job, Rank(1), kLong));
  EXPECT_EQ(step, Step(7));
}

// A coordinator that was started with another state file, or an older one, and then with the right one.
TEST_F(LeftOut, ACoordinatorThatDoesNotKnowTheEpoch_EndsNoWait) {
  for (const absl::StatusOr<v1::ListVersionsReply>& wrong :
       {absl::StatusOr<v1::ListVersionsReply>(absl::NotFoundError("no job j")),
        absl::StatusOr<v1::ListVersionsReply>(AtEpoch(2)),
        absl::StatusOr<v1::ListVersionsReply>(absl::UnavailableError("down"))}) {
    const AnsweringWorker worker([](int call) { return Has(3, call < 200 ? -1 : 7); });
    v1::JobDescription described = Described(worker);
    described.set_heartbeat_timeout_ms(500);
    int asked = 0;
    EXPECT_CALL(*coordinator_, ListVersions(_, _)).WillRepeatedly([&] {
      return ++asked == 2 ? wrong : absl::StatusOr<v1::ListVersionsReply>(AtEpoch(3));
    });
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Open(described));
    ASSERT_OK_AND_ASSIGN(const Step step, AwaitCommittedStep(*job, Rank(1), kLong));
    EXPECT_EQ(step.value(), 7);
    EXPECT_GE(asked, 2);
  }
}

TEST_F(LeftOut, CountTrainers_IsOfThisEpoch) {
  std::atomic<int64_t> epoch{3};
  const AnsweringWorker worker([&](int) {
    v1::GetStatusReply::Job job = Has(epoch, 7);
    job.add_trainers();
    return job;
  });
  ON_CALL(*coordinator_, ListVersions(_, _)).WillByDefault(Return(AtEpoch(3)));
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Job> job, Open(Described(worker)));
  ASSERT_OK_AND_ASSIGN(const int trainers, job->CountTrainers(kLong));
  EXPECT_EQ(trainers, 2);  // one at each rank
  epoch = 4;
  EXPECT_THAT(job->CountTrainers(kLong), StatusIs(Code::kAborted, HasSubstr("now 4: open the job again")));
  epoch = 3;  // it was not told yet
  ON_CALL(*coordinator_, ListVersions(_, _)).WillByDefault(Return(AtEpoch(4)));
  ASSERT_OK_AND_ASSIGN(job, Open(Described(worker)));
  EXPECT_THAT(job->CountTrainers(kLong), StatusIs(Code::kAborted, HasSubstr("as the coordinator says")));
}

}  // namespace
}  // namespace shardmesh
