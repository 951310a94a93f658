#include "worker/snapshot.h"

#include <cstring>

#include "core/matchers.h"
#include "worker/memory.h"
#include "worker/pass.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Snapshot> New(const Plan& plan, int shard = 0) { return *Snapshot::Create(plan, shard); }

TEST(SnapshotPortTest, HasOneAtATime) {
  const TestHost host(SmallJob("fsdp=2", 1));
  const auto first = New(host.plan), second = New(host.plan);
  SnapshotPort port;
  EXPECT_EQ(port.Wanted(), nullptr);
  ASSERT_OK(port.Ask(first));
  EXPECT_THAT(port.Ask(second), StatusIs(absl::StatusCode::kAborted, HasSubstr("another checkpoint")));
  EXPECT_EQ(port.Wanted(), first);
  EXPECT_FALSE(port.Await(absl::ZeroDuration()).has_value());
  port.Filled(first.get(), {7, 1});
  EXPECT_EQ(port.Wanted(), nullptr);  // once
  ASSERT_TRUE(port.Await(absl::ZeroDuration()).has_value());
  EXPECT_EQ(port.Await(absl::ZeroDuration())->step, 7);
  EXPECT_EQ(port.Await(absl::ZeroDuration())->parity, 1);
  EXPECT_FALSE(port.Ask(second).ok());
  port.TakeAway();
  ASSERT_OK(port.Ask(second));
  port.Filled(first.get(), {8, 0});  // a pass that began before
  EXPECT_FALSE(port.Await(absl::ZeroDuration()).has_value());
  EXPECT_EQ(port.Wanted(), second);
}

// Every byte of weights and states as they lay, and the next step changes nothing of it.
TEST(SnapshotTest, ADigest_FillsIt_AndOnlyThen) {
  PassGroup group(SmallJob("fsdp=2", 1), 2);
  group.PlaceWeights();
  group.RunStep(1);
  SnapshotPort ports[2];
  std::shared_ptr<Snapshot> snapshots[2];
  for (int r = 0; r < 2; ++r) {
    snapshots[r] = New(group.plan, r);
    group.passes[r]->TakeSnapshots(&ports[r]);
    ASSERT_OK(ports[r].Ask(snapshots[r]));
  }
  group.RunStep(2);
  EXPECT_FALSE(ports[0].Await(absl::ZeroDuration()).has_value());
  group.Digest();
  std::vector<std::string> before[2];
  const auto bytes_of = [&](const ShardStorage& storage) {
    std::vector<std::string> bytes;
    for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
      for (int stream = 0; stream < kStreams; ++stream) {
        bytes.emplace_back(storage.StreamBegin(range, stream), storage.StreamBytes(range, stream));
      }
    }
    return bytes;
  };
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(ports[r].Await(absl::ZeroDuration()).has_value());
    EXPECT_EQ(ports[r].Await(absl::ZeroDuration())->parity, group.parity);
    before[r] = bytes_of(*group.storages[r]);
    EXPECT_EQ(bytes_of(snapshots[r]->storage()), before[r]);
  }
  group.RunStep(4);  // 3 is skipped
  group.Digest();
  for (int r = 0; r < 2; ++r) {
    EXPECT_NE(bytes_of(*group.storages[r]), before[r]);
    EXPECT_EQ(bytes_of(snapshots[r]->storage()), before[r]);
  }
}

TEST(SnapshotTest, WhatIsGivenBack_ReadsAsZeros_AndNothingElse) {
  ASSERT_OK_AND_ASSIGN(const Segment memory, NewPrivateMemory()->Open("memory", 8 * kSegmentPage, 0));
  std::memset(memory.data(), 7, memory.data_bytes());
  Snapshot::GiveBack(memory.data() + 100, 3 * kSegmentPage);                 // whole pages: 1 and 2
  Snapshot::GiveBack(memory.data() + 5 * kSegmentPage, kSegmentPage - 100);  // none
  for (int64_t i = 0; i < memory.data_bytes(); ++i) {
    const int64_t page = i / kSegmentPage;
    ASSERT_EQ(memory.data()[i], page == 1 || page == 2 ? 0 : 7) << i;
  }
}

}  // namespace
}  // namespace shardmesh
