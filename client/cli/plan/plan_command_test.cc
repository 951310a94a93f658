// The picture of a plan, on a job small enough to draw by hand.
#include "client/cli/plan/plan_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

JobSpec SmallJob() {
  JobSpec job;
  job.name = "small";
  job.mesh = *ParseMeshSpec("ddp=2,fsdp=2");
  job.parameters = {{"first", {2, 200}, WeightFormat::kFp32, ""},
                    {"second", {256}, WeightFormat::kFp32, ""},
                    {"tied", {2, 200}, WeightFormat::kFp32, "first"},
                    {"half", {257}, WeightFormat::kBf16, ""}};
  job.more_groups = {job.optimizer};
  job.parameters[0].group = 1;
  return job;
}

// Columns of 64 elements, blocks of 256: first has 2 blocks (112 elements of padding), second 1, the shards' end 1;
// half 2.
TEST(PlanCommandTest, Drawing_MarksParametersAndPadding) {
  const JobSpec job = SmallJob();
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  const std::string drawing = DrawPlan(job, plan);
  EXPECT_THAT(drawing, HasSubstr("plan " + plan.hash() + " of mesh ddp=2,fsdp=2\nshards 2  replicas 2  buckets 2"));
  EXPECT_THAT(drawing, HasSubstr("bucket 0  layout      ranks  padding\n"
                                 "shard 0   |aaaaaaa.|  0,2        112\n"
                                 "shard 1   |bbbb....|  1,3        256\n"));
  EXPECT_THAT(drawing, HasSubstr("bucket 1  layout  ranks  padding\n"
                                 "shard 0   |aaaa|  0,2          0\n"
                                 "shard 1   |a...|  1,3        255\n"));
  EXPECT_THAT(drawing, HasSubstr("tied       a     [2,200]       0       0       400      -  first\n"));
}

// A column stands for many groups; the whole bar is never wider than 64.
TEST(PlanCommandTest, Drawing_LargeShard_IsScaled) {
  JobSpec job;
  job.name = "large";
  job.mesh = *ParseMeshSpec("fsdp=1");
  job.parameters = {{"a", {3, 1 << 20}, WeightFormat::kFp32, ""}, {"b", {1 << 20}, WeightFormat::kFp32, ""}};
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  EXPECT_THAT(DrawPlan(job, plan), HasSubstr("|" + std::string(48, 'a') + std::string(16, 'b') + "|"));
}

TEST(PlanCommandTest, Json_HasBucketsAndPlacements) {
  const JobSpec job = SmallJob();
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  const auto json = PlanToJson(job, plan);
  EXPECT_EQ(json["hash"], plan.hash());
  EXPECT_EQ(json["shards"], 2);
  EXPECT_EQ(json["buckets"][0]["padding"], 1024 - 400 - 256);
  EXPECT_EQ(json["buckets"][1]["format"], "bf16");
  EXPECT_EQ(json["buckets"][1]["states"], "fp32");
  EXPECT_EQ(json["placements"][2]["tied_to"], "first");
  EXPECT_EQ(json["placements"][0]["group"], 1);
  EXPECT_TRUE(json["placements"][2]["group"].is_null());
  EXPECT_EQ(json["placements"][1]["group"], 0);
  EXPECT_EQ(json["placements"][1]["offset"], 512);
}

}  // namespace
}  // namespace shardmesh
