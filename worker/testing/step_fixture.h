// StepFixture: the step protocol of a job with three slots on mesh ddp=2,fsdp=2 alone: members execute by saying so.
#pragma once

#include <utility>
#include <vector>

#include "core/base/matchers.h"
#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/small_job.h"

namespace shardmesh {

struct StepFixture : ::testing::Test, TestHost {
  StepFixture() : StepFixture(SmallJob("ddp=2,fsdp=2", 3)) {}
  explicit StepFixture(const JobSpec& job) : TestHost(job) {}

  void AllExecute() {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      EXPECT_FALSE(protocol.commands().AllDone());
      protocol.commands().Done(Rank(r), protocol.decided());
    }
    EXPECT_TRUE(protocol.commands().AllDone());
  }

  void Finish() {
    ASSERT_TRUE(DecideNext(protocol, plan));
    AllExecute();
    Lead::CommitNewest(protocol);
  }

  void PlaceWeights() {
    for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().InitialShardReady(Rank(r), 17);
    Finish();
  }

  void GradientShards(int slot, int64_t step) {
    for (int s = 0; s < plan.num_shards(); ++s)
      ASSERT_OK(protocol.declarations().GradientShardReady(Slot(slot), s, Step(step)));
  }

  absl::StatusOr<std::optional<StepOutcome>> Declare(std::vector<Slot> slots, int64_t step, double lr = 0.5,
                                                     std::vector<std::pair<Slot, int>> bad = {}) {
    return protocol.declarations().Declare({std::move(slots), Step(step), {lr}, std::move(bad)});
  }

  absl::StatusOr<std::optional<StepOutcome>> DeclareRates(std::vector<Slot> slots, int64_t step,
                                                          std::vector<double> rates) {
    return protocol.declarations().Declare({std::move(slots), Step(step), std::move(rates), {}});
  }

  void RunStep(int64_t step, std::vector<std::pair<Slot, int>> bad = {}) {
    for (int s = 0; s < 3; ++s) GradientShards(s, step);
    ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, step, 0.5, std::move(bad)));
    Finish();
  }
};

}  // namespace shardmesh
