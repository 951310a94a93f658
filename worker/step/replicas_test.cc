// StepProtocol: replicas of a shard are compared, and the one that differs is named.
#include "absl/strings/str_cat.h"
#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Of a job with check_every: replicas are compared after each multiple, before anything else, and a difference ends it.
struct CheckedReplicasTest : StepFixture {
  CheckedReplicasTest() : StepFixture(Checked()) {}
  static JobSpec Checked() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.check_every = 2;
    return job;
  }
  // What the lead decides next is a comparison; `odd`: what the last member's digest has more than its replica's.
  void Compare(uint64_t odd = 0) {
    ASSERT_TRUE(MoreFollows(ReadCommitted(*protocol.control()), job, plan));
    ASSERT_TRUE(DecideNext(protocol, plan));
    ASSERT_EQ(protocol.command().kind, CommandKind::kDigest);
    for (int r = 0; r < plan.num_ranks(); ++r) {
      protocol.control()->members[r].digest = 100 + plan.PlaceOf(Rank(r)).shard + (r == plan.num_ranks() - 1 ? odd : 0);
    }
    AllExecute();
    Lead::CommitNewest(protocol);
  }
};

TEST_F(CheckedReplicasTest, AreComparedAfterEachMultiple) {
  PlaceWeights();
  EXPECT_FALSE(MoreFollows(ReadCommitted(*protocol.control()), job, plan));
  RunStep(1);
  EXPECT_FALSE(MoreFollows(ReadCommitted(*protocol.control()), job, plan));
  RunStep(2, {{Slot(1), 0}});  // a skipped step counts
  for (int s = 0; s < 3; ++s) GradientShards(s, 3);
  ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, 3));
  ASSERT_NO_FATAL_FAILURE(Compare());
  EXPECT_OK(protocol.members().Health());
  EXPECT_FALSE(MoreFollows(ReadCommitted(*protocol.control()), job, plan));
  Finish();  // the step that was declared before
  EXPECT_EQ(protocol.committed_step(), Step(3));
  RunStep(4);
  ASSERT_NO_FATAL_FAILURE(Compare(1));
  EXPECT_THAT(
      protocol.members().Health(),
      StatusIs(Code::kDataLoss, AllOf(HasSubstr("worker-3 (rank 3"), HasSubstr("the same shard as worker-1 (rank 1)"),
                                      HasSubstr("other bits at step 4: versions after step 2, when they were"),
                                      HasSubstr("have both machines checked"))));
  EXPECT_THAT(Declare({Slot(0)}, 5), StatusIs(Code::kDataLoss, HasSubstr("other bits")));
}

// Of three the one that stands alone is named, whichever it is.
struct ThreeReplicasTest : StepFixture {
  explicit ThreeReplicasTest(int check_every = 0) : StepFixture(Job(check_every)) {}
  static JobSpec Job(int check_every) {
    JobSpec job = SmallJob("ddp=3", 3);
    job.check_every = check_every;
    return job;
  }
};
struct ThreeCheckedReplicasTest : ThreeReplicasTest {
  ThreeCheckedReplicasTest() : ThreeReplicasTest(1) {}
};

TEST_F(ThreeCheckedReplicasTest, TheOneThatStandsAlone_EndsTheJob) {
  PlaceWeights();
  RunStep(1);
  ASSERT_TRUE(DecideNext(protocol, plan));
  for (int r = 0; r < 3; ++r) protocol.control()->members[r].digest = r == 0 ? 8 : 7;
  AllExecute();
  Lead::CommitNewest(protocol);
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kDataLoss, AllOf(HasSubstr("worker worker-0 (rank 0"),
                                                                           HasSubstr("the same shard as worker-1"),
                                                                           HasSubstr("have its machine's memory"))));
}

TEST_F(ThreeReplicasTest, TheOneThatStandsAlone_IsNamed) {
  PlaceWeights();
  for (int odd = 0; odd < 3; ++odd) {
    const uint64_t ticket = protocol.tickets().AskForDigest();
    ASSERT_TRUE(DecideNext(protocol, plan));
    for (int r = 0; r < 3; ++r) protocol.control()->members[r].digest = r == odd ? 8 : 7;
    AllExecute();
    Lead::CommitNewest(protocol);
    const std::string most = absl::StrCat("worker-", odd == 0 ? 1 : 0), alone = absl::StrCat("and worker worker-", odd);
    EXPECT_THAT(protocol.tickets().DigestOf(ticket),
                StatusIs(Code::kDataLoss, AllOf(HasSubstr(most), HasSubstr(alone))));
  }
}

}  // namespace
}  // namespace shardmesh
