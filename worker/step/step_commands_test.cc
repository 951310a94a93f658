// StepProtocol: decisions, commits, publications and digests.
#include <atomic>
#include <thread>

#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

using StepDecisionTest = StepFixture;

TEST_F(StepDecisionTest, InitialWeights_NeedOneSetFromAll) {
  EXPECT_EQ(protocol.committed_step().value(), kNoStep);
  EXPECT_FALSE(DecideNext(protocol, plan));
  for (int r = 0; r < 3; ++r) protocol.commands().InitialShardReady(Rank(r), 5);
  EXPECT_FALSE(DecideNext(protocol, plan));
  protocol.commands().InitialShardReady(Rank(3), 6);  // of another set
  EXPECT_FALSE(DecideNext(protocol, plan));
  protocol.commands().InitialShardReady(Rank(3), 5);
  EXPECT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kInit);
  EXPECT_EQ(protocol.command().initial_id, 5u);
  EXPECT_EQ(protocol.committed_step().value(), kNoStep);
  AllExecute();
  Lead::CommitNewest(protocol);
  EXPECT_EQ(protocol.committed_step(), Step(0));
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0)));
}

TEST_F(StepDecisionTest, Step_IsDeclaredDecidedExecutedCommitted) {
  PlaceWeights();
  for (int s = 0; s < 2; ++s) {
    GradientShards(s, 1);
    ASSERT_OK_AND_ASSIGN(auto outcome, Declare({Slot(s)}, 1));
    EXPECT_FALSE(outcome.has_value());
    EXPECT_FALSE(DecideNext(protocol, plan));
  }
  ASSERT_OK(Declare({Slot(2)}, 1));
  EXPECT_FALSE(DecideNext(protocol, plan));  // a gradient shard of slot 2 is missing
  EXPECT_FALSE(protocol.declarations().HasGradientShard(Slot(2), 0, Step(1)));
  ASSERT_OK(protocol.declarations().GradientShardReady(Slot(2), 0, Step(1)));
  EXPECT_FALSE(DecideNext(protocol, plan));
  EXPECT_THAT(protocol.outcomes().AwaitCommit(Step(1), absl::ZeroDuration()),
              StatusIs(Code::kDeadlineExceeded, AllOf(HasSubstr("step 1"), HasSubstr("missing slots: 2"))));
  ASSERT_OK(protocol.declarations().GradientShardReady(Slot(2), 1, Step(1)));
  EXPECT_TRUE(protocol.declarations().HasGradientShard(Slot(2), 1, Step(1)));
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
  EXPECT_EQ(protocol.command().step, 1);
  EXPECT_EQ(protocol.command().apply, 1);
  EXPECT_EQ(protocol.command().parity, 0);
  OptimizerHyper hyper = job.optimizer;
  hyper.lr = 0.5;
  const StepScalars& scalars = GroupTable(host.control(), plan).scalars(protocol.command().groups)[0];
  EXPECT_EQ(scalars.neg_step_size, ComputeStepScalars(hyper, 1)->neg_step_size);
  EXPECT_EQ(protocol.commands().NotDone().size(), 4u);
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1)).has_value());
  AllExecute();
  EXPECT_EQ(protocol.committed_step(), Step(0));
  Lead::CommitNewest(protocol);
  EXPECT_EQ(protocol.committed_step(), Step(1));
  EXPECT_EQ(protocol.control()->parity.load(), 1);
  ASSERT_OK_AND_ASSIGN(StepOutcome outcome, protocol.outcomes().AwaitCommit(Step(1), absl::ZeroDuration()));
  EXPECT_FALSE(outcome.already_applied);
  EXPECT_FALSE(outcome.skipped);
}

TEST_F(StepDecisionTest, NonFinite_SkipsTheStep) {
  PlaceWeights();
  RunStep(1, {{Slot(2), 1}});
  ASSERT_OK_AND_ASSIGN(StepOutcome outcome, protocol.outcomes().AwaitCommit(Step(1), absl::ZeroDuration()));
  EXPECT_TRUE(outcome.skipped);
  EXPECT_EQ(outcome.bad_slot, Slot(2));
  EXPECT_EQ(outcome.bad_tensor, 1);
  EXPECT_EQ(protocol.control()->parity.load(), 0);  // nothing moved
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0)));
  ASSERT_OK_AND_ASSIGN(auto again, Declare({Slot(2)}, 1));
  EXPECT_TRUE(again->skipped && again->already_applied);
  RunStep(2);
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(2))->skipped);
  EXPECT_EQ(protocol.control()->parity.load(), 1);
}

struct TwoPublications : StepFixture {
  static JobSpec Two() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.publications = 2;
    return job;
  }
  TwoPublications() : StepFixture(Two()) {}
};

TEST_F(TwoPublications, Alternate_AndAPinnedOneIsNeverRewritten) {
  PlaceWeights();
  RunStep(1);
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0), Step(1)));
  RunStep(2);  // over version 0
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(1), Step(2)));
  EXPECT_FALSE(protocol.publications().Pin(Step(0)).has_value());
  const std::optional<int> pinned = protocol.publications().Pin(Step(1));
  ASSERT_TRUE(pinned.has_value());
  RunStep(3);  // would go over version 1: not published, training goes on
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(1), Step(2)));
  EXPECT_EQ(protocol.command().publish, -1);
  protocol.publications().Unpin(*pinned);
  RunStep(4);
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(2), Step(4)));
  EXPECT_EQ(protocol.command().publish, *pinned);
}

// Weights that are gathered in codes: the step, and the initial weights, take a second command, and are committed with
// it alone.
struct QuantizedFixture : StepFixture {
  static JobSpec Quantized() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    for (ParameterSpec& p : job.parameters) p.gather = GatherFormat::kFp8Row;
    return job;
  }
  QuantizedFixture() : StepFixture(Quantized()) {}

  void DeclareAll(int64_t step, std::vector<std::pair<Slot, int>> bad = {}) {
    for (int s = 0; s < 3; ++s) GradientShards(s, step);
    ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, step, 0.5, std::move(bad)));
  }
  // Executes and commits the command that was just decided; the table of maxima has something in it then.
  void ExecuteAndCommit() {
    AllExecute();
    for (int64_t i = 0; i < plan.scales().num_maxima; ++i) Maxima(protocol.control(), plan)[i] = 77;
    Lead::CommitNewest(protocol);
  }
};

TEST_F(QuantizedFixture, TheStepIsCommittedWithTheCodes) {
  ASSERT_EQ(plan.scales().num_maxima, 3 + 1);
  for (int r = 0; r < 4; ++r) protocol.commands().InitialShardReady(Rank(r), 5);
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kInit);
  const int buffer = protocol.command().publish;
  ExecuteAndCommit();
  EXPECT_EQ(protocol.committed(), protocol.decided());
  EXPECT_EQ(protocol.committed_step().value(), kNoStep);
  EXPECT_TRUE(protocol.publications().Published().empty());
  StepProtocol next(protocol.control(), &host.notifier(), &job, &plan, MemberNames(4));  // whoever leads on
  ASSERT_TRUE(DecideNext(next, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kQuantize);
  EXPECT_EQ(protocol.command().step, 0);
  EXPECT_EQ(protocol.command().publish, buffer);
  EXPECT_EQ(Maxima(protocol.control(), plan)[0], 77u);  // what it is made from
  ExecuteAndCommit();
  EXPECT_EQ(protocol.committed_step(), Step(0));
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0)));
  EXPECT_FALSE(DecideNext(protocol, plan));  // once

  DeclareAll(1);
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
  for (int64_t i = 0; i < plan.scales().num_maxima; ++i) EXPECT_EQ(Maxima(protocol.control(), plan)[i], 0u);
  ExecuteAndCommit();
  EXPECT_EQ(protocol.control()->parity.load(), 1);
  EXPECT_EQ(protocol.committed_step(), Step(0));
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1)).has_value());
  protocol.tickets().AskForDigest();  // waits
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kQuantize);
  EXPECT_EQ(protocol.command().step, 1);
  EXPECT_EQ(protocol.command().parity, 1);  // where the new weights lie
  ExecuteAndCommit();
  EXPECT_EQ(protocol.control()->parity.load(), 1);
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0), Step(1)));
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kDigest);
}

TEST_F(QuantizedFixture, SkippedStep_IsCommittedAtOnce) {
  for (int r = 0; r < 4; ++r) protocol.commands().InitialShardReady(Rank(r), 5);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(DecideNext(protocol, plan));
    ExecuteAndCommit();
  }
  DeclareAll(1, {{Slot(2), 1}});
  ASSERT_TRUE(DecideNext(protocol, plan));
  ExecuteAndCommit();
  EXPECT_EQ(protocol.committed_step(), Step(1));
  EXPECT_TRUE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
  EXPECT_FALSE(DecideNext(protocol, plan));
}

// Frozen weights are quantized once, with the initial ones: where no others are quantized, a step needs no second
// command.
struct FrozenQuantizedFixture : StepFixture {
  static JobSpec Frozen() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.parameters[0].gather = GatherFormat::kFp8Row;
    job.parameters[0].frozen = true;
    return job;
  }
  FrozenQuantizedFixture() : StepFixture(Frozen()) {}
};

TEST_F(FrozenQuantizedFixture, OnlyInitialWeightsAreGathered) {
  PlaceWeights();
  EXPECT_EQ(protocol.committed_step().value(), kNoStep);
  Finish();
  EXPECT_EQ(protocol.command().kind, CommandKind::kQuantize);
  EXPECT_EQ(protocol.committed_step(), Step(0));
  RunStep(1);
  EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
  EXPECT_EQ(protocol.committed_step(), Step(1));
  EXPECT_FALSE(DecideNext(protocol, plan));
}

struct ClippedFixture : StepFixture {
  static JobSpec Clipped() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.clip_norm = 0.5;
    return job;
  }
  ClippedFixture() : StepFixture(Clipped()) {}

  // As the passes of all members would: of both tensors' one block.
  void WriteSums(float first, float second) {
    SquareSums(protocol.control())[0] = first;
    SquareSums(protocol.control())[1] = second;
  }
};

TEST_F(ClippedFixture, TheNormIsKnownBeforeTheStepIsDecided) {
  PlaceWeights();
  for (int64_t step = 1; step <= 2; ++step) {
    for (int s = 0; s < 3; ++s) GradientShards(s, step);
    ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, step));
    ASSERT_TRUE(DecideNext(protocol, plan));
    EXPECT_EQ(protocol.command().kind, CommandKind::kNorm);
    EXPECT_EQ(protocol.command().step, step);
    WriteSums(9, step == 1 ? 16 : 0);
    AllExecute();
    Lead::CommitNewest(protocol);
    EXPECT_EQ(protocol.committed_step(), Step(step - 1));  // nothing was stepped yet
    ASSERT_TRUE(DecideNext(protocol, plan));
    EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
    EXPECT_EQ(protocol.command().clip, ClipFactor(0.5, step == 1 ? 5 : 3));
    AllExecute();
    Lead::CommitNewest(protocol);
    ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, protocol.outcomes().AwaitCommit(Step(step), absl::ZeroDuration()));
    EXPECT_EQ(outcome.norm, step == 1 ? 5 : 3);
  }
}

TEST_F(ClippedFixture, ASkippedStep_NeedsNoNorm) {
  PlaceWeights();
  for (int s = 0; s < 3; ++s) GradientShards(s, 1);
  ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, 1, 0.5, {{Slot(2), 1}}));
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
  EXPECT_EQ(protocol.command().apply, 0);
  AllExecute();
  Lead::CommitNewest(protocol);
  EXPECT_EQ(protocol.outcomes().OutcomeOf(Step(1))->norm, 0);
}

TEST(StepDecisionPolicyTest, PublishEvery_IsAMultiple) {
  JobSpec job = SmallJob("fsdp=1", 1);
  job.publish_every = 3;
  TestHost host(job);
  host.protocol.commands().InitialShardReady(Rank(0), 1);
  for (int64_t step = 0; step <= 7; ++step) {
    if (step > 0) {
      ASSERT_OK(host.protocol.declarations().GradientShardReady(Slot(0), 0, Step(step)));
      ASSERT_OK(host.protocol.declarations().Declare({{Slot(0)}, Step(step), {0.5}, {}}));
    }
    ASSERT_TRUE(DecideNext(host.protocol, host.plan));
    EXPECT_EQ(host.protocol.command().publish >= 0, step % 3 == 0) << step;
    host.protocol.commands().Done(Rank(0), host.protocol.decided());
    Lead::CommitNewest(host.protocol);
  }
  EXPECT_THAT(host.protocol.publications().Published(), ElementsAre(Step(3), Step(6)));
}

// A writer publishes by the rules as fast as it can; readers that hold a pin must see one version's bytes only.
TEST(StepDecisionPolicyTest, PinnedBytes_AreOfOneVersion) {
  TestHost host(SmallJob("fsdp=1", 1));
  constexpr int kWords = 64;
  std::atomic<int64_t> buffers[kMaxPublications][kWords] = {};
  std::atomic<int64_t> pinned_reads{0};
  std::atomic<bool> stop{false};
  const auto reader = [&] {
    while (!stop.load()) {
      for (Step step : host.protocol.publications().Published()) {
        const std::optional<int> buffer = host.protocol.publications().Pin(step);
        if (!buffer.has_value()) continue;
        for (const auto& word : buffers[*buffer]) ASSERT_EQ(word.load(std::memory_order_relaxed), step.value());
        host.protocol.publications().Unpin(*buffer);
        pinned_reads.fetch_add(1);
      }
    }
  };
  std::thread readers[2] = {std::thread(reader), std::thread(reader)};
  host.protocol.commands().InitialShardReady(Rank(0), 1);
  int64_t published = 0;
  for (int64_t step = 0; step < 20'000 || (pinned_reads.load() < 100 && step < 2'000'000); ++step) {
    if (step > 0) {
      ASSERT_OK(host.protocol.declarations().GradientShardReady(Slot(0), 0, Step(step)));
      ASSERT_OK(host.protocol.declarations().Declare({{Slot(0)}, Step(step), {0.5}, {}}));
    }
    ASSERT_TRUE(DecideNext(host.protocol, host.plan));
    if (const int target = host.protocol.command().publish; target >= 0) {
      for (auto& word : buffers[target]) word.store(step, std::memory_order_relaxed);
      ++published;
    }
    host.protocol.commands().Done(Rank(0), host.protocol.decided());
    Lead::CommitNewest(host.protocol);
  }
  stop.store(true);
  for (std::thread& thread : readers) thread.join();
  EXPECT_GT(published, 0);
  EXPECT_GE(pinned_reads.load(), 100);
}

TEST_F(StepDecisionTest, Digests_AddShardsUp_AndCompareReplicas) {
  PlaceWeights();
  const uint64_t first = protocol.tickets().AskForDigest();
  ASSERT_OK_AND_ASSIGN(auto none, protocol.tickets().DigestOf(first));
  EXPECT_FALSE(none.has_value());
  const auto answer = [&](std::vector<uint64_t> digests) {
    ASSERT_TRUE(DecideNext(protocol, plan));
    EXPECT_EQ(protocol.command().kind, CommandKind::kDigest);
    for (int r = 0; r < 4; ++r) protocol.control()->members[r].digest.store(digests[r]);
    AllExecute();
    Lead::CommitNewest(protocol);
  };
  answer({10, 20, 10, 20});  // ranks of mesh ddp=2,fsdp=2: shards 0 1 0 1
  ASSERT_OK_AND_ASSIGN(auto digest, protocol.tickets().DigestOf(first));
  EXPECT_EQ(digest->first, Step(0));
  EXPECT_EQ(digest->second, 30u);
  EXPECT_FALSE(DecideNext(protocol, plan));  // answered
  RunStep(1);
  const uint64_t second = protocol.tickets().AskForDigest(), third = protocol.tickets().AskForDigest();
  EXPECT_GT(third, second);
  answer({10, 20, 10, 21});
  for (uint64_t ticket : {second, third}) {  // one command answers both
    EXPECT_THAT(protocol.tickets().DigestOf(ticket),
                StatusIs(Code::kDataLoss,
                         AllOf(HasSubstr("step 1"), HasSubstr("worker-1 (rank 1)"), HasSubstr("worker-3 (rank 3)"))));
  }
  EXPECT_EQ(protocol.committed_step(), Step(1));
  RunStep(2);  // the job goes on
}

TEST_F(StepDecisionTest, WhatAllLoaded_IsWhatTheJobBeginsWith) {
  const auto load = [&](int rank, uint64_t id, int64_t step) {
    protocol.commands().LoadedReady(Rank(rank), id, Step(step));
  };
  for (int r = 0; r < plan.num_ranks() - 1; ++r) load(r, 99, 40);
  EXPECT_FALSE(DecideNext(protocol, plan));
  load(plan.num_ranks() - 1, 98, 30);  // another checkpoint
  EXPECT_FALSE(DecideNext(protocol, plan));
  for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().InitialShardReady(Rank(r), 17);
  load(plan.num_ranks() - 1, 99, 40);
  ASSERT_NO_FATAL_FAILURE(Finish());
  EXPECT_EQ(protocol.command().kind, CommandKind::kRestore);
  EXPECT_EQ(protocol.command().initial_id, 99u);
  EXPECT_EQ(protocol.command().first, 1);
  EXPECT_EQ(protocol.committed_step(), Step(40));
  EXPECT_THAT(protocol.publications().Published(), ::testing::ElementsAre(Step(40)));
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, protocol.outcomes().AwaitCommit(Step(40), absl::ZeroDuration()));
  EXPECT_FALSE(outcome.skipped);
  EXPECT_FALSE(DecideNext(protocol, plan));  // the initial weights came too late
  RunStep(41);
  EXPECT_EQ(protocol.committed_step(), Step(41));
}

}  // namespace
}  // namespace shardmesh
