#include "worker/step_protocol.h"

#include <atomic>
#include <thread>

#include "core/matchers.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// The protocol alone: members execute by saying so.
struct StepProtocolTest : ::testing::Test, TestHost {
  StepProtocolTest() : TestHost(SmallJob("ddp=2,fsdp=2", 3)) {}

  void AllExecute() {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      EXPECT_FALSE(protocol.AllDone());
      protocol.Done(Rank(r), protocol.decided());
    }
    EXPECT_TRUE(protocol.AllDone());
  }

  void Finish() {
    ASSERT_TRUE(protocol.Decide());
    AllExecute();
    protocol.Commit();
  }

  void PlaceWeights() {
    for (int r = 0; r < plan.num_ranks(); ++r) protocol.InitialPieceReady(Rank(r), 17);
    Finish();
  }

  void Pieces(int slot, int64_t step) {
    for (int s = 0; s < plan.num_shards(); ++s) ASSERT_OK(protocol.PieceReady(Slot(slot), s, Step(step)));
  }

  absl::StatusOr<std::optional<StepOutcome>> Declare(std::vector<Slot> slots, int64_t step, double lr = 0.5,
                                                     std::vector<std::pair<Slot, int>> bad = {}) {
    return protocol.Declare({std::move(slots), Step(step), lr, std::move(bad)});
  }

  void RunStep(int64_t step, std::vector<std::pair<Slot, int>> bad = {}) {
    for (int s = 0; s < 3; ++s) Pieces(s, step);
    ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, step, 0.5, std::move(bad)));
    Finish();
  }
};

TEST_F(StepProtocolTest, InitialWeights_NeedOneSetFromAll) {
  EXPECT_EQ(protocol.committed_step().value(), kNoStep);
  EXPECT_FALSE(protocol.Decide());
  for (int r = 0; r < 3; ++r) protocol.InitialPieceReady(Rank(r), 5);
  EXPECT_FALSE(protocol.Decide());
  protocol.InitialPieceReady(Rank(3), 6);  // of another set
  EXPECT_FALSE(protocol.Decide());
  protocol.InitialPieceReady(Rank(3), 5);
  EXPECT_TRUE(protocol.Decide());
  EXPECT_EQ(protocol.command().kind, CommandKind::kInit);
  EXPECT_EQ(protocol.command().initial_id, 5u);
  EXPECT_EQ(protocol.committed_step().value(), kNoStep);
  AllExecute();
  protocol.Commit();
  EXPECT_EQ(protocol.committed_step(), Step(0));
  EXPECT_THAT(protocol.Published(), ElementsAre(Step(0)));
}

TEST_F(StepProtocolTest, Step_IsDeclaredDecidedExecutedCommitted) {
  PlaceWeights();
  for (int s = 0; s < 2; ++s) {
    Pieces(s, 1);
    ASSERT_OK_AND_ASSIGN(auto outcome, Declare({Slot(s)}, 1));
    EXPECT_FALSE(outcome.has_value());
    EXPECT_FALSE(protocol.Decide());
  }
  ASSERT_OK(Declare({Slot(2)}, 1));
  EXPECT_FALSE(protocol.Decide());  // a piece of slot 2 is missing
  EXPECT_FALSE(protocol.HasPiece(Slot(2), 0, Step(1)));
  ASSERT_OK(protocol.PieceReady(Slot(2), 0, Step(1)));
  EXPECT_FALSE(protocol.Decide());
  EXPECT_THAT(protocol.AwaitCommit(Step(1), absl::ZeroDuration()),
              StatusIs(Code::kDeadlineExceeded, AllOf(HasSubstr("step 1"), HasSubstr("missing slots: 2"))));
  ASSERT_OK(protocol.PieceReady(Slot(2), 1, Step(1)));
  EXPECT_TRUE(protocol.HasPiece(Slot(2), 1, Step(1)));
  ASSERT_TRUE(protocol.Decide());
  EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
  EXPECT_EQ(protocol.command().step, 1);
  EXPECT_EQ(protocol.command().apply, 1);
  EXPECT_EQ(protocol.command().parity, 0);
  AdamWHyper hyper = job.optimizer;
  hyper.lr = 0.5;
  EXPECT_EQ(protocol.command().scalars.neg_step_size, ComputeAdamWScalars(hyper, 1)->neg_step_size);
  EXPECT_EQ(protocol.NotDone().size(), 4u);
  EXPECT_FALSE(protocol.OutcomeOf(Step(1)).has_value());
  AllExecute();
  EXPECT_EQ(protocol.committed_step(), Step(0));
  protocol.Commit();
  EXPECT_EQ(protocol.committed_step(), Step(1));
  EXPECT_EQ(protocol.page()->parity.load(), 1);
  ASSERT_OK_AND_ASSIGN(StepOutcome outcome, protocol.AwaitCommit(Step(1), absl::ZeroDuration()));
  EXPECT_FALSE(outcome.already_applied);
  EXPECT_FALSE(outcome.skipped);
}

TEST_F(StepProtocolTest, RepeatedStep_IsAlreadyApplied_AndChangesNothing) {
  PlaceWeights();
  RunStep(1);
  ASSERT_OK_AND_ASSIGN(auto again, Declare({Slot(1)}, 1, 99));
  ASSERT_TRUE(again.has_value());
  EXPECT_TRUE(again->already_applied);
  EXPECT_FALSE(protocol.Decide());
  RunStep(2);
  ASSERT_OK(protocol.PieceReady(Slot(0), 0, Step(1)));  // late: no effect on what is ready
  EXPECT_TRUE(protocol.HasPiece(Slot(0), 0, Step(2)));
}

TEST_F(StepProtocolTest, WrongSteps_SayWhichIsNext) {
  EXPECT_THAT(Declare({Slot(0)}, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  PlaceWeights();
  EXPECT_THAT(Declare({Slot(0)}, 2),
              StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("step 2 is ahead"), HasSubstr("the next is 1"))));
  EXPECT_THAT(protocol.PieceReady(Slot(0), 0, Step(7)), StatusIs(Code::kFailedPrecondition, HasSubstr("step 7")));
  EXPECT_THAT(Declare({Slot(0)}, 0), StatusIs(Code::kInvalidArgument, HasSubstr("numbered from 1")));
  EXPECT_THAT(Declare({Slot(0)}, INT64_MIN), StatusIs(Code::kInvalidArgument, HasSubstr("numbered from 1")));
  EXPECT_THAT(Declare({}, 1), StatusIs(Code::kInvalidArgument, HasSubstr("name at least one")));
}

TEST_F(StepProtocolTest, WrongSlots_AreRefused_AndNothingIsDeclared) {
  PlaceWeights();
  for (int slot : {-1, 3, INT32_MAX}) {
    EXPECT_THAT(Declare({Slot(0), Slot(slot)}, 1), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(protocol.PieceReady(Slot(slot), 0, Step(1)), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(protocol.TakeSlot(Slot(slot), 1), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    protocol.GiveSlot(Slot(slot), 1);
  }
  EXPECT_EQ(protocol.page()->slots[0].declared.load(), 0);
  EXPECT_EQ(protocol.page()->lr_claim.load(), 0u);
}

TEST_F(StepProtocolTest, LearningRate_IsTheSameFromEverySlot) {
  PlaceWeights();
  ASSERT_OK(Declare({Slot(1)}, 1, 0.5));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.25),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("0.25"), HasSubstr("slot 1 said 0.5"))));
  EXPECT_THAT(Declare({Slot(1)}, 1, 0.25), StatusIs(Code::kInvalidArgument, HasSubstr("0.5 before, and now 0.25")));
  EXPECT_THAT(Declare({Slot(0)}, 1, -1), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_EQ(protocol.page()->slots[0].declared.load(), 0);
  ASSERT_OK(Declare({Slot(1)}, 1, 0.5));  // repeated
  ASSERT_OK(Declare({Slot(0), Slot(2)}, 1, 0.5));
  for (int s = 0; s < 3; ++s) Pieces(s, 1);
  Finish();
  for (int s = 0; s < 3; ++s) Pieces(s, 2);
  ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, 2, 0.25));  // another step, another rate
  ASSERT_TRUE(protocol.Decide());
  AdamWHyper hyper = job.optimizer;
  hyper.lr = 0.25;
  EXPECT_EQ(protocol.command().scalars.neg_step_size, ComputeAdamWScalars(hyper, 2)->neg_step_size);
}

TEST_F(StepProtocolTest, NonFinite_SkipsTheStep) {
  PlaceWeights();
  RunStep(1, {{Slot(2), 1}});
  ASSERT_OK_AND_ASSIGN(StepOutcome outcome, protocol.AwaitCommit(Step(1), absl::ZeroDuration()));
  EXPECT_TRUE(outcome.skipped);
  EXPECT_EQ(outcome.bad_slot, Slot(2));
  EXPECT_EQ(outcome.bad_tensor, 1);
  EXPECT_EQ(protocol.page()->parity.load(), 0);  // nothing moved
  EXPECT_THAT(protocol.Published(), ElementsAre(Step(0)));
  ASSERT_OK_AND_ASSIGN(auto again, Declare({Slot(2)}, 1));
  EXPECT_TRUE(again->skipped && again->already_applied);
  RunStep(2);
  EXPECT_FALSE(protocol.OutcomeOf(Step(2))->skipped);
  EXPECT_EQ(protocol.page()->parity.load(), 1);
}

TEST_F(StepProtocolTest, NonFinite_OfAnotherSlotOrTensor_IsRefused) {
  PlaceWeights();
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(1), 0}}), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1")));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(0), 2}}), StatusIs(Code::kInvalidArgument, HasSubstr("tensor 2")));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(0), -1}}), StatusIs(Code::kInvalidArgument, HasSubstr("tensor -1")));
  EXPECT_EQ(protocol.page()->lr_claim.load(), 0u);
  EXPECT_EQ(protocol.page()->slots[0].declared.load(), 0);
  RunStep(1);
  EXPECT_FALSE(protocol.OutcomeOf(Step(1))->skipped);
}

TEST(StepProtocolPolicyTest, NonFinite_UnderPolicyFail_IsRefusedAndMayBeWrittenAgain) {
  JobSpec job = SmallJob("fsdp=1", 1);
  job.non_finite = NonFinitePolicy::kFail;
  TestHost host(job);
  host.protocol.InitialPieceReady(Rank(0), 1);
  ASSERT_TRUE(host.protocol.Decide());
  host.protocol.Done(Rank(0), 1);
  host.protocol.Commit();
  EXPECT_THAT(host.protocol.Declare({{Slot(0)}, Step(1), 0.5, {{Slot(0), 1}}}),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("\"layer.b\""), HasSubstr("write it again"))));
  ASSERT_OK(host.protocol.Declare({{Slot(0)}, Step(1), 0.5, {}}));
  ASSERT_OK(host.protocol.PieceReady(Slot(0), 0, Step(1)));
  ASSERT_TRUE(host.protocol.Decide());
  EXPECT_EQ(host.protocol.command().apply, 1);
}

TEST_F(StepProtocolTest, Slot_HasOneWriter) {
  const uint64_t first = uint64_t{1} << 32 | 7, second = uint64_t{3} << 32 | 9;
  ASSERT_OK(protocol.TakeSlot(Slot(1), first));
  EXPECT_EQ(protocol.HolderOf(Slot(1)), first);
  EXPECT_THAT(protocol.TakeSlot(Slot(1), second),
              StatusIs(Code::kFailedPrecondition, HasSubstr("session 7 attached to rank 0")));
  protocol.GiveSlot(Slot(1), second);
  EXPECT_EQ(protocol.HolderOf(Slot(1)), first);
  protocol.GiveSlot(Slot(1), first);
  EXPECT_OK(protocol.TakeSlot(Slot(1), second));
}

TEST_F(StepProtocolTest, PublicationsAlternate_AndAPinnedOneIsNeverRewritten) {
  PlaceWeights();
  RunStep(1);
  EXPECT_THAT(protocol.Published(), ElementsAre(Step(0), Step(1)));
  RunStep(2);  // over version 0
  EXPECT_THAT(protocol.Published(), ElementsAre(Step(1), Step(2)));
  EXPECT_FALSE(protocol.Pin(Step(0)).has_value());
  const std::optional<int> pinned = protocol.Pin(Step(1));
  ASSERT_TRUE(pinned.has_value());
  RunStep(3);  // would go over version 1: not published, training goes on
  EXPECT_THAT(protocol.Published(), ElementsAre(Step(1), Step(2)));
  EXPECT_EQ(protocol.command().publish, -1);
  protocol.Unpin(*pinned);
  RunStep(4);
  EXPECT_THAT(protocol.Published(), ElementsAre(Step(2), Step(4)));
  EXPECT_EQ(protocol.command().publish, *pinned);
}

TEST(StepProtocolPolicyTest, PublishEvery_IsAMultiple) {
  JobSpec job = SmallJob("fsdp=1", 1);
  job.publish_every = 3;
  TestHost host(job);
  host.protocol.InitialPieceReady(Rank(0), 1);
  for (int64_t step = 0; step <= 7; ++step) {
    if (step > 0) {
      ASSERT_OK(host.protocol.PieceReady(Slot(0), 0, Step(step)));
      ASSERT_OK(host.protocol.Declare({{Slot(0)}, Step(step), 0.5, {}}));
    }
    ASSERT_TRUE(host.protocol.Decide());
    EXPECT_EQ(host.protocol.command().publish >= 0, step % 3 == 0) << step;
    host.protocol.Done(Rank(0), host.protocol.decided());
    host.protocol.Commit();
  }
  EXPECT_THAT(host.protocol.Published(), ElementsAre(Step(3), Step(6)));
}

// A writer publishes by the rules as fast as it can; readers that hold a pin must see one version's bytes only.
TEST(StepProtocolPolicyTest, PinnedBytes_AreOfOneVersion) {
  TestHost host(SmallJob("fsdp=1", 1));
  constexpr int kWords = 64;
  std::atomic<int64_t> buffers[kPublicationBuffers][kWords] = {};
  std::atomic<int64_t> pinned_reads{0};
  std::atomic<bool> stop{false};
  const auto reader = [&] {
    while (!stop.load()) {
      for (Step step : host.protocol.Published()) {
        const std::optional<int> buffer = host.protocol.Pin(step);
        if (!buffer.has_value()) continue;
        for (const auto& word : buffers[*buffer]) ASSERT_EQ(word.load(std::memory_order_relaxed), step.value());
        host.protocol.Unpin(*buffer);
        pinned_reads.fetch_add(1);
      }
    }
  };
  std::thread readers[2] = {std::thread(reader), std::thread(reader)};
  host.protocol.InitialPieceReady(Rank(0), 1);
  int64_t published = 0;
  for (int64_t step = 0; step < 20'000 || (pinned_reads.load() < 100 && step < 2'000'000); ++step) {
    if (step > 0) {
      ASSERT_OK(host.protocol.PieceReady(Slot(0), 0, Step(step)));
      ASSERT_OK(host.protocol.Declare({{Slot(0)}, Step(step), 0.5, {}}));
    }
    ASSERT_TRUE(host.protocol.Decide());
    if (const int target = host.protocol.command().publish; target >= 0) {
      for (auto& word : buffers[target]) word.store(step, std::memory_order_relaxed);
      ++published;
    }
    host.protocol.Done(Rank(0), host.protocol.decided());
    host.protocol.Commit();
  }
  stop.store(true);
  for (std::thread& thread : readers) thread.join();
  EXPECT_GT(published, 0);
  EXPECT_GE(pinned_reads.load(), 100);
}

TEST_F(StepProtocolTest, Digests_AddShardsUp_AndCompareReplicas) {
  PlaceWeights();
  const uint64_t first = protocol.AskForDigest();
  ASSERT_OK_AND_ASSIGN(auto none, protocol.DigestOf(first));
  EXPECT_FALSE(none.has_value());
  const auto answer = [&](std::vector<uint64_t> digests) {
    ASSERT_TRUE(protocol.Decide());
    EXPECT_EQ(protocol.command().kind, CommandKind::kDigest);
    for (int r = 0; r < 4; ++r) protocol.page()->members[r].digest.store(digests[r]);
    AllExecute();
    protocol.Commit();
  };
  answer({10, 20, 10, 20});  // ranks of mesh ddp=2,fsdp=2: shards 0 1 0 1
  ASSERT_OK_AND_ASSIGN(auto digest, protocol.DigestOf(first));
  EXPECT_EQ(digest->first, Step(0));
  EXPECT_EQ(digest->second, 30u);
  EXPECT_FALSE(protocol.Decide());  // answered
  RunStep(1);
  const uint64_t second = protocol.AskForDigest(), third = protocol.AskForDigest();
  EXPECT_GT(third, second);
  answer({10, 20, 10, 21});
  for (uint64_t ticket : {second, third}) {  // one command answers both
    EXPECT_THAT(protocol.DigestOf(ticket),
                StatusIs(Code::kDataLoss,
                         AllOf(HasSubstr("step 1"), HasSubstr("worker-1 (rank 1)"), HasSubstr("worker-3 (rank 3)"))));
  }
  EXPECT_EQ(protocol.committed_step(), Step(1));
  RunStep(2);  // the job goes on
}

TEST_F(StepProtocolTest, Abort_FirstCauseStays_AndAnswersAll) {
  PlaceWeights();
  RunStep(1);
  ASSERT_OK(Declare({Slot(0)}, 2));
  protocol.SignOfLife(Rank(2), 1, 4711);
  protocol.Abort(AbortReason::kGone, 2, Rank(0));
  protocol.Abort(AbortReason::kLate, 1, Rank(3));
  const auto dead =
      StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-2 (rank 2, pid 4711)"), HasSubstr("is gone"),
                                         HasSubstr("seen by rank 0"), HasSubstr("last committed step is 1")));
  EXPECT_THAT(protocol.Health(), dead);
  EXPECT_THAT(Declare({Slot(1)}, 2), dead);
  EXPECT_THAT(protocol.PieceReady(Slot(1), 0, Step(2)), dead);
  EXPECT_THAT(protocol.AwaitCommit(Step(2), absl::Seconds(60)), dead);
  EXPECT_THAT(protocol.DigestOf(protocol.AskForDigest()), dead);
  EXPECT_FALSE(protocol.Decide());
  ASSERT_OK_AND_ASSIGN(auto again, Declare({Slot(1)}, 1));  // what was committed is still told
  EXPECT_TRUE(again->already_applied);
}

TEST_F(StepProtocolTest, EveryReason_HasItsWords) {
  const std::pair<AbortReason, const char*> reasons[] = {{AbortReason::kSilent, "no sign of life"},
                                                         {AbortReason::kLate, "did not finish"},
                                                         {AbortReason::kLeft, "told to stop"},
                                                         {AbortReason::kInternal, "internal error"}};
  for (const auto& [reason, words] : reasons) {
    protocol.page()->abort.store(0);
    protocol.Abort(reason, 1, Rank(0));
    EXPECT_THAT(protocol.Health(), StatusIs(Code::kUnavailable, HasSubstr(words)));
  }
}

TEST_F(StepProtocolTest, Abort_EndsAWaitUnderWay) {
  PlaceWeights();
  std::thread waiter([&] {
    EXPECT_THAT(protocol.AwaitCommit(Step(1), absl::Seconds(60)), StatusIs(Code::kUnavailable, HasSubstr("rank 3")));
  });
  protocol.Abort(AbortReason::kSilent, 3, Rank(0));
  waiter.join();
}

TEST_F(StepProtocolTest, Commit_EndsAWaitUnderWay) {
  PlaceWeights();
  std::thread waiter([&] { EXPECT_OK(protocol.AwaitCommit(Step(1), absl::Seconds(60))); });
  RunStep(1);
  waiter.join();
}

TEST_F(StepProtocolTest, CheckPeers_NamesWhoIsSilent) {
  const absl::Duration timeout = absl::Seconds(3);
  const int64_t second = 1'000'000'000;
  for (int r = 0; r < 3; ++r) protocol.SignOfLife(Rank(r), 10 * second, 100 + r);  // rank 3 has not come yet
  protocol.CheckPeers(Rank(0), 13 * second, timeout);
  EXPECT_OK(protocol.Health());
  protocol.SignOfLife(Rank(2), 12 * second, 102);
  protocol.CheckPeers(Rank(1), 13 * second, timeout);
  EXPECT_OK(protocol.Health());
  protocol.SignOfLife(Rank(1), 13 * second, 101);
  protocol.CheckPeers(Rank(0), 15 * second + 1, timeout);  // rank 0 does not look at itself
  EXPECT_THAT(protocol.Health(), StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-2 (rank 2, pid 102)"),
                                                                    HasSubstr("no sign of life"))));
}

TEST_F(StepProtocolTest, OutcomeRing_KeepsTheNewest) {
  PlaceWeights();
  RunStep(1, {{Slot(0), 0}});
  for (int64_t step = 2; step <= kOutcomeRing; ++step) RunStep(step);
  EXPECT_TRUE(protocol.OutcomeOf(Step(1))->skipped);
  RunStep(kOutcomeRing + 1);
  EXPECT_TRUE(protocol.OutcomeOf(Step(1))->already_applied);  // known to be over; why is forgotten
  EXPECT_FALSE(protocol.OutcomeOf(Step(1))->skipped);
  RunStep(kOutcomeRing + 2, {{Slot(1), 1}});
  EXPECT_FALSE(protocol.OutcomeOf(Step(2))->skipped);
  EXPECT_TRUE(protocol.OutcomeOf(Step(kOutcomeRing + 2))->skipped);
  EXPECT_FALSE(protocol.OutcomeOf(Step(kOutcomeRing + 3)).has_value());
}

}  // namespace
}  // namespace shardmesh
