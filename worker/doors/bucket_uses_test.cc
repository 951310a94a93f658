// BucketUses: over the incarnations of a worker a request of a session counts once, however often it comes.
#include "worker/doors/bucket_uses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "core/base/matchers.h"
#include "worker/control/residency.h"
#include "worker/lead/step_mail.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

struct BucketUsesTest : ::testing::Test {
  static constexpr uint64_t kHolder = uint64_t{1} << 32 | 7;

  void SetUp() override {
    JobSpec job = SmallJob("fsdp=1", 3);
    job.residency = Residency::kBucket;
    job.parameters.clear();
    for (const char* name : {"a", "b", "c"}) job.parameters.push_back({name, {1024}, WeightFormat::kFp32});
    ASSERT_NO_FATAL_FAILURE(host.Start(job));
    ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
    ASSERT_OK_AND_ASSIGN(shard, host.workers[0]->Find("small"));
    for (const int slot : slots) ASSERT_OK(shard->protocol().slots().Take(Slot(slot), kHolder));
  }
  BucketUses Incarnation(bool resumed) { return BucketUses(shard, slots, resumed); }
  int Uses(int bucket) const { return UsesIn(shard->protocol().buckets().UsesOf(bucket, Slot(1))); }

  LocalHost host{1};
  std::shared_ptr<JobShard> shard;
  const std::vector<int> slots = {2, 1};
};

TEST_F(BucketUsesTest, TheNextIncarnationGoesOn_ARepeatedRequestCountsOnce) {
  {
    BucketUses first = Incarnation(false);
    ASSERT_OK(first.Add(0, 1));
    ASSERT_OK(first.Add(2, 2));
    ASSERT_OK(first.Add(2, 3));
  }
  EXPECT_EQ(Uses(0), 1);
  EXPECT_EQ(Uses(2), 2);
  BucketUses next = Incarnation(true);
  ASSERT_OK(next.Add(2, 3));
  EXPECT_EQ(Uses(2), 2);
  EXPECT_THAT(next.Add(1, 4), StatusIs(Code::kResourceExhausted, HasSubstr("may use (0,2)")));
  ASSERT_OK(next.Drop(0, 5));
  BucketUses last = Incarnation(true);
  ASSERT_OK(last.Drop(0, 5));
  EXPECT_THAT(last.Drop(0, 6), StatusIs(Code::kFailedPrecondition, HasSubstr("acquire it first")));
  ASSERT_OK(last.Drop(2, 7));
  EXPECT_EQ(Uses(2), 1);
  EXPECT_OK(last.Add(1, 8));
}

// The use of a request that failed is gone; repeated, it is a new one.
TEST_F(BucketUsesTest, TakenBack_ARepeatedRequestCountsAgain) {
  {
    BucketUses first = Incarnation(false);
    ASSERT_OK(first.Add(0, 1));
    first.TakeBack(0);
  }
  EXPECT_EQ(Uses(0), 0);
  BucketUses next = Incarnation(true);
  ASSERT_OK(next.Add(0, 1));
  EXPECT_EQ(Uses(0), 1);
}

TEST_F(BucketUsesTest, ASessionThatIsGone_UsesNothing) {
  ASSERT_OK(Incarnation(false).Add(0, 1));
  EXPECT_EQ(Uses(0), 1);
  const std::atomic<bool> stop{false};
  GiveSlotsBack(shard->protocol(), slots, kHolder, stop);
  EXPECT_EQ(Uses(0), 0);
  EXPECT_TRUE(Await([&] { return !shard->protocol().buckets().Holds(0); }));
}

TEST_F(BucketUsesTest, ManyUsesOfOneBucket_HaveALimit) {
  BucketUses uses = Incarnation(false);
  ASSERT_OK(uses.Add(0, 1));
  ASSERT_OK(shard->protocol().buckets().Use(0, Slot(1), UseWord(1, kMaxUses)));
  EXPECT_THAT(Incarnation(true).Add(0, 2), StatusIs(Code::kResourceExhausted, HasSubstr("65535 uses")));
}

}  // namespace
}  // namespace shardmesh
