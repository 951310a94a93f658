// What a connected trainer of a job with pulled slots may say (Shard.Seat, Shard.Trainer, Shard.Push), also in an order
// that PullingSession does not have: repeated requests count once, wrong ones are refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/seat_transport.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(30);

class SeatRequests : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, testing::Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 1;
    spec.clip_norm = 1;
    ASSERT_OK_AND_ASSIGN(job_, Create(spec));
    v1::SeatRequest request;
    request.set_job("job");
    request.set_epoch(job_->epoch().value());
    ASSERT_OK_AND_ASSIGN(seat_, worker().Seat(request, kLong));
  }
  absl::StatusOr<std::shared_ptr<Job>> Create(const JobSpec& spec) {
    ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client_->CreateJob(spec));
    RETURN_IF_ERROR(testing::Initialize(*job));
    return job;
  }
  ShardTransport& worker() { return job_->worker(Rank(1)); }
  v1::TrainerRequest Request(bool take, int finished = -1) const {
    v1::TrainerRequest request;
    request.set_id(7);
    request.set_session(seat_->reply().session());
    request.mutable_slot()->set_take(take);
    if (finished < 0) return request;
    request.mutable_slot()->mutable_finished()->set_slot(finished);
    request.mutable_slot()->mutable_finished()->set_step(1);
    return request;
  }
  absl::StatusOr<v1::PushReply> Push(int slot, int shard, int64_t step = 1, char byte = '\0') {
    v1::PushHeader header;
    header.set_job("job");
    header.set_epoch(job_->epoch().value());
    header.set_content(v1::PushHeader::CONTENT_GRADIENT);
    header.set_slot(slot);
    header.set_step(step);
    header.set_shard(shard);
    header.set_session(seat_->reply().session());
    const std::string gradient_shard(static_cast<size_t>(job_->plan().GradientShardBytes(shard)), byte);
    return worker().Push(header, {gradient_shard}, kLong);
  }

  std::unique_ptr<testing::Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<SeatTransport> seat_;
};

TEST_F(SeatRequests, Repeated_CountOnce) {
  EXPECT_EQ(seat_->reply().committed_step(), 0);
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(const v1::TrainerReply taken, worker().Trainer(Request(true), kLong));
    EXPECT_EQ(taken.id(), 7u);
    EXPECT_EQ(taken.slot().slot(), 0);
    EXPECT_EQ(taken.slot().step(), 1);
  }
  ASSERT_OK(Push(0, 0));
  ASSERT_OK(Push(0, 0));
  ASSERT_OK(Push(0, 1));
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(const v1::TrainerReply finished, worker().Trainer(Request(false, 0), kLong));
    EXPECT_EQ(finished.slot().result(), v1::SLOT_RESULT_ACCEPTED);
    ASSERT_OK_AND_ASSIGN(const v1::PushReply pushed, Push(0, 1, 1, '\x3f'));  // dropped: the window is the workers'
    EXPECT_FALSE(pushed.applied());
  }
  ASSERT_OK_AND_ASSIGN(const v1::TrainerReply taken, worker().Trainer(Request(true, 0), kLong));
  EXPECT_EQ(taken.slot().result(), v1::SLOT_RESULT_ACCEPTED);
  EXPECT_EQ(taken.slot().slot(), 1);
  ASSERT_OK(Push(1, 0));
  ASSERT_OK(Push(1, 1));
  ASSERT_OK_AND_ASSIGN(const v1::TrainerReply last, worker().Trainer(Request(true, 1), kLong));
  EXPECT_EQ(last.slot().result(), v1::SLOT_RESULT_ACCEPTED);
  EXPECT_EQ(last.slot().committed().step(), 1);
  EXPECT_EQ(last.slot().committed().gradient_norm(), 0);
  ASSERT_OK_AND_ASSIGN(const v1::PushReply late, Push(1, 1));
  EXPECT_TRUE(late.applied());
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kLong));
  ASSERT_EQ(status.jobs(0).trainers_size(), 1);
  EXPECT_EQ(status.jobs(0).trainers(0).slots_finished(), 2);
  EXPECT_EQ(status.jobs(0).slots_differing(), 0);
}

// Until a slot is finished the weights that it is computed with stay as they are.
TEST_F(SeatRequests, WeightsForASlot_AreThereUntilItIsFinished) {
  ASSERT_OK(worker().Trainer(Request(true), kLong));
  const auto pull = [&](int slot) {
    v1::PullRequest request;
    request.set_job("job");
    request.set_for_slot(slot);
    return worker()
        .Pull(
            request, [](const v1::PullHeader&) { return absl::OkStatus(); },
            [](absl::string_view) { return absl::OkStatus(); }, kLong)
        .status();
  };
  EXPECT_OK(pull(0));
  ASSERT_OK(Push(0, 0));
  ASSERT_OK(Push(0, 1));
  ASSERT_OK(worker().Trainer(Request(false, 0), kLong));
  EXPECT_THAT(pull(0), StatusIs(Code::kAborted, HasSubstr("slot 0 of step 1 was finished while version 0 was read")));
  EXPECT_OK(pull(1));
}

TEST_F(SeatRequests, InAWrongOrder_AreRefused) {
  const auto refused = [](Code code, const char* text) { return StatusIs(code, HasSubstr(text)); };
  EXPECT_THAT(Push(0, 0).status(), refused(Code::kFailedPrecondition, "is not the one that this trainer took"));
  EXPECT_THAT(worker().Trainer(Request(false, 0), kLong),
              refused(Code::kFailedPrecondition, "is not the one that this trainer took"));
  ASSERT_OK(worker().Trainer(Request(true), kLong));
  ASSERT_OK(Push(0, 1));
  EXPECT_THAT(worker().Trainer(Request(false, 0), kLong),
              refused(Code::kFailedPrecondition, "the gradient of shard 0"));
  EXPECT_THAT(Push(1, 0).status(), refused(Code::kFailedPrecondition, "is not the one that this trainer took"));
  EXPECT_THAT(Push(0, 0, 2).status(), refused(Code::kFailedPrecondition, "is not the one that this trainer took"));
  EXPECT_THAT(worker().Trainer(Request(false), kLong), refused(Code::kInvalidArgument, "neither takes nor finishes"));
  v1::TrainerRequest request = Request(true);
  EXPECT_THAT(job_->worker(Rank(0)).Trainer(request, kLong), refused(Code::kNotFound, "take a seat"));
  request.set_session(0);
  EXPECT_THAT(worker().Trainer(request, kLong), refused(Code::kInvalidArgument, "session is 0"));
  request = Request(true);
  request.mutable_step()->set_step(1);
  EXPECT_THAT(worker().Trainer(request, kLong), refused(Code::kInvalidArgument, "with 2 of step, declare and slot"));
  seat_->Leave();
  EXPECT_TRUE(seat_->AwaitOver(kLong));
  const absl::Time deadline = MonotonicNow() + kLong;
  absl::Status over;
  while (!absl::IsNotFound(over) && MonotonicNow() < deadline) over = worker().Trainer(Request(true), kLong).status();
  EXPECT_THAT(over, refused(Code::kNotFound, "take a seat"));
}

// The one request of a trainer has also what Step and DeclareBucket have.
TEST_F(SeatRequests, OfAStep_IsShardStep) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(testing::OddJob("assigned", "fsdp=1", 1)));
  v1::TrainerRequest request;
  request.mutable_step()->set_job("assigned");
  request.mutable_step()->set_epoch(job->epoch().value());
  request.mutable_step()->add_slots(0);
  request.mutable_step()->set_step(1);
  EXPECT_THAT(job->worker(Rank(0)).Trainer(request, kLong),
              StatusIs(Code::kFailedPrecondition, HasSubstr("lacks the gradient of shard 0")));
  v1::SeatRequest seat;
  seat.set_job("assigned");
  seat.set_epoch(job->epoch().value());
  EXPECT_THAT(job->worker(Rank(0)).Seat(seat, kLong).status(),
              StatusIs(Code::kFailedPrecondition, HasSubstr("are assigned: push and declare those")));
  v1::PushHeader header;
  header.set_job("assigned");
  header.set_epoch(job->epoch().value());
  header.set_content(v1::PushHeader::CONTENT_GRADIENT);
  header.set_step(1);
  const std::string gradient_shard(static_cast<size_t>(job->plan().GradientShardBytes(0)), '\0');
  ASSERT_OK(job->worker(Rank(0)).Push(header, {gradient_shard}, kLong));
  ASSERT_OK_AND_ASSIGN(const v1::TrainerReply reply, job->worker(Rank(0)).Trainer(request, kLong));
  EXPECT_EQ(reply.step().step(), 1);
}

}  // namespace
}  // namespace shardmesh
