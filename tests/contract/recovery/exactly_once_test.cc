// Contract 5: every RPC can be repeated, and its answer may be lost at any moment: a step is applied once. The pushes
// and steps here are made call by call, with repetitions, stale and early calls and cancelled ones between them; the
// job must learn what an undisturbed one learns.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <iostream>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/raw_trainer.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::RawTrainer;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kSlots = 2;
constexpr absl::Duration kTimeout = absl::Seconds(20);

void SetDeadline(grpc::ClientContext& context) { context.set_deadline(absl::ToChronoTime(absl::Now() + kTimeout)); }

class ExactlyOnce : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 4}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec_));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK(testing::Initialize(*job_));  // repeated: only the first set counts
    ASSERT_OK_AND_ASSIGN(trainer_, RawTrainer::Create(job_));
  }

  // Sends the request and goes away before the answer.
  void StepAndLoseTheReply(int rank, std::vector<int> slots, int64_t step, absl::Duration after) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::StepReply reply;
    std::thread cancel([&] {
      testing::Pause(after);
      context.TryCancel();
    });
    (void)trainer_->stub(Rank(rank)).Step(&context, trainer_->Request(slots, step), &reply);
    cancel.join();
  }
  // Sends a header and the first `bytes` of the gradient shard, then cancels.
  void PushPartAndCancel(int slot, int64_t step, int shard, size_t bytes) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::PushReply reply;
    const auto writer = trainer_->stub(trainer_->Owner(slot, shard)).Push(&context, &reply);
    v1::PushChunk chunk;
    *chunk.mutable_header() = trainer_->Header(slot, step, shard);
    chunk.set_data(std::string(bytes, '\x3f'));  // other bytes than the gradient shard's
    writer->Write(chunk);
    context.TryCancel();
    EXPECT_FALSE(writer->Finish().ok());
  }
  // A push of (slot 0, step 1, shard 0) that hangs after 64 bytes; cancelled with the object.
  struct HangingPush {
    grpc::ClientContext context;
    v1::PushReply reply;
    std::unique_ptr<grpc::ClientWriter<v1::PushChunk>> writer;
    ~HangingPush() {
      context.TryCancel();
      (void)writer->Finish();
    }
  };
  // Null: the worker had not begun it after `wait`, and so took the empty push that looks for it.
  std::unique_ptr<HangingPush> TryHangingPush(absl::Duration wait) {
    auto push = std::make_unique<HangingPush>();
    SetDeadline(push->context);
    push->writer = trainer_->stub(trainer_->Owner(0, 0)).Push(&push->context, &push->reply);
    v1::PushChunk chunk;
    *chunk.mutable_header() = trainer_->Header(0, 1, 0);
    chunk.set_data(std::string(64, '\x3f'));
    push->writer->Write(chunk);
    testing::Pause(wait);
    grpc::ClientContext context;
    SetDeadline(context);
    v1::PushReply reply;
    const auto empty = trainer_->stub(trainer_->Owner(0, 0)).Push(&context, &reply);
    chunk.clear_data();
    empty->Write(chunk);
    empty->WritesDone();
    if (empty->Finish().error_code() == grpc::StatusCode::ABORTED) return push;
    return nullptr;
  }
  void ExpectAsUndisturbed(int64_t steps) {
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, steps));
    ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, spec_, steps));
    EXPECT_EQ(learnt, undisturbed);
  }

  const JobSpec spec_ = testing::OddJob("job", "ddp=2,fsdp=2", kSlots);
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<RawTrainer> trainer_;
};

TEST_F(ExactlyOnce, RepeatedPushesAndSteps) {
  for (int64_t step = 1; step <= 5; ++step) {
    ASSERT_OK(trainer_->PushAll(step));
    ASSERT_OK_AND_ASSIGN(const v1::PushReply repeated, trainer_->Push(0, step, 0));
    EXPECT_FALSE(repeated.applied());
    ASSERT_OK_AND_ASSIGN(const v1::StepReply first, trainer_->Step(step % 4, {0, 1}, step));
    EXPECT_EQ(first.step(), step);
    EXPECT_FALSE(first.already_applied());
    for (int rank = 0; rank < 4; ++rank) {
      ASSERT_OK_AND_ASSIGN(const v1::StepReply again, trainer_->Step(rank, {0, 1}, step));
      EXPECT_TRUE(again.already_applied());
      EXPECT_EQ(again.step(), step);
    }
    ASSERT_OK_AND_ASSIGN(const v1::PushReply late, trainer_->Push(0, step, 0));
    EXPECT_TRUE(late.applied());
    ASSERT_OK_AND_ASSIGN(const v1::StepReply first_step, trainer_->Step(0, {0}, 1));
    EXPECT_TRUE(first_step.already_applied());
  }
  ExpectAsUndisturbed(5);
}

TEST_F(ExactlyOnce, FutureStepsAreRefused_AndChangeNothing) {
  ASSERT_OK(trainer_->PushAll(1));
  EXPECT_THAT(trainer_->Push(0, 2, 0), StatusIs(Code::kFailedPrecondition, HasSubstr("step 2 is ahead")));
  EXPECT_THAT(trainer_->Step(0, {0, 1}, 2), StatusIs(Code::kFailedPrecondition, HasSubstr("the next is 1")));
  ASSERT_OK(trainer_->Step(0, {0, 1}, 1));
  EXPECT_THAT(trainer_->Push(0, 7, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("the next is 2")));
  EXPECT_THAT(trainer_->Step(1, {0, 1}, 2), StatusIs(Code::kFailedPrecondition, HasSubstr("lacks the gradient of shard")));
  ASSERT_OK(trainer_->PushAll(2));
  ASSERT_OK(trainer_->Step(1, {0, 1}, 2));
  ExpectAsUndisturbed(2);
}

TEST_F(ExactlyOnce, StepsOfTheSameSlotAtOnce) {
  for (int64_t step = 1; step <= 5; ++step) {
    ASSERT_OK(trainer_->PushAll(step));
    std::vector<std::thread> callers;
    for (int rank = 0; rank < 4; ++rank) {
      callers.emplace_back([&, rank] {
        const auto reply = trainer_->Step(rank, {rank % 2}, step);
        EXPECT_OK(reply);
        EXPECT_TRUE(!reply.ok() || reply->step() == step);
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  ExpectAsUndisturbed(5);
}

TEST_F(ExactlyOnce, LostReplies) {
  for (int64_t step = 1; step <= 10; ++step) {
    PushPartAndCancel(0, step, step % 2, 100 * step);
    for (int slot = 0; slot < kSlots; ++slot) {
      for (int shard = 0; shard < 2; ++shard) ASSERT_OK(trainer_->PushAgain(slot, step, shard));
    }
    StepAndLoseTheReply(step % 4, {0}, step, absl::Milliseconds(step % 5));
    StepAndLoseTheReply((step + 1) % 4, {0, 1}, step, absl::Milliseconds(step % 3));
    ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, trainer_->Step(0, {0, 1}, step));
    EXPECT_EQ(reply.step(), step);
  }
  ExpectAsUndisturbed(10);
}

// A push that hangs half-way holds its gradient shard: neither a second push nor an attached trainer writes beside it,
// so that what still arrives of it never lands in gradients of another.
TEST_F(ExactlyOnce, PushThatHangs_NobodyElseWritesMeanwhile) {
  std::unique_ptr<HangingPush> old;
  for (int attempt = 1; attempt <= 10 && old == nullptr; ++attempt)
    old = TryHangingPush(absl::Milliseconds(50 * attempt));
  ASSERT_NE(old, nullptr);
  EXPECT_THAT(trainer_->Push(0, 1, 0), StatusIs(Code::kAborted, HasSubstr("under way")));
  EXPECT_THAT(job_->Attach({Slot(0)}), StatusIs(Code::kAborted, HasSubstr("receives a push to slot 0")));
  old.reset();
  ASSERT_OK(trainer_->PushAgain(0, 1, 0));
  ASSERT_OK(trainer_->PushAll(1));
  ASSERT_OK(trainer_->Step(0, {0, 1}, 1));
  ASSERT_OK_AND_ASSIGN(const auto session, job_->Attach({Slot(0)}));
  EXPECT_THAT(trainer_->Push(0, 2, 0), StatusIs(Code::kFailedPrecondition, HasSubstr("written by session")));
  ExpectAsUndisturbed(1);
}

TEST_F(ExactlyOnce, PieceSentToTheOtherReplica_IsRefusedAndSentOn) {
  const std::string gradient_shard = testing::GradientShard(*job_, Slot(1), Step(1), 0);
  const Rank right = trainer_->Owner(1, 0), wrong = job_->plan().RankOf({0, 0});
  ASSERT_NE(right, wrong);
  EXPECT_THAT(job_->worker(wrong).Push(trainer_->Header(1, 1, 0), {gradient_shard}, kTimeout),
              StatusIs(Code::kInvalidArgument, HasSubstr(absl::StrCat("push it to rank ", right.value()))));
  ASSERT_OK(trainer_->PushAll(1));
  ASSERT_OK(trainer_->Step(0, {0, 1}, 1));
  ExpectAsUndisturbed(1);
}

// All of it, in an order drawn at random.
TEST_F(ExactlyOnce, Interleaved) {
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  constexpr int64_t kSteps = 15;
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (int call = 0; call < 12; ++call) {
      const int slot = random() % kSlots, shard = random() % 2, rank = random() % 4;
      switch (random() % 6) {
        case 0:
          PushPartAndCancel(slot, step, shard, random() % 1000);
          break;
        case 1:
          ASSERT_OK(trainer_->PushAgain(slot, step, shard));
          break;
        case 2:
          (void)trainer_->Push(slot, std::max<int64_t>(1, step - 1), shard);
          break;
        case 3:
          EXPECT_THAT(trainer_->Push(slot, step + 2, shard), StatusIs(Code::kFailedPrecondition, HasSubstr("ahead")));
          break;
        case 4:
          StepAndLoseTheReply(rank, {slot}, step, absl::Milliseconds(random() % 3));
          break;
        default:
          EXPECT_THAT(trainer_->Step(rank, {slot}, step + 2), StatusIs(Code::kFailedPrecondition, HasSubstr("ahead")));
      }
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      for (int shard = 0; shard < 2; ++shard) ASSERT_OK(trainer_->PushAgain(slot, step, shard));
    }
    ASSERT_OK(trainer_->Step(random() % 4, {0, 1}, step));
  }
  ExpectAsUndisturbed(kSteps);
}

}  // namespace
}  // namespace shardmesh
