#include "worker/pass/snapshot.h"

#include <cstring>

#include "core/base/matchers.h"
#include "worker/memory/memory.h"
#include "worker/pass/pass.h"
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

// What every run of a shard holds, as it is placed by `parity`.
std::vector<std::string> BytesOf(const ShardStorage& storage, int parity) {
  std::vector<std::string> bytes;
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    const auto add = [&](const void* data, int stream, const ChunkRun& run) {
      const int64_t size = storage.ranges()[range].parts[stream].BytesOf(run.num_elements);
      if (size > 0) bytes.emplace_back(static_cast<const char*>(data), size);
    };
    for (const ChunkRun& run : storage.runs(range)) {
      for (int stream = 0; stream <= kStates; ++stream) {
        const StoredRun at = stream == 0 ? storage.weights(range, parity, run.offset)
                                         : storage.state(stream - 1, range, parity, run.offset);
        add(at.codes, StreamOf(stream, false), run);
        add(at.extra, StreamOf(stream, true), run);
      }
    }
  }
  return bytes;
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
  const int parity = group.parity;
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(ports[r].Await(absl::ZeroDuration()).has_value());
    EXPECT_EQ(ports[r].Await(absl::ZeroDuration())->parity, parity);
    before[r] = BytesOf(*group.storages[r], parity);
    EXPECT_EQ(BytesOf(snapshots[r]->storage(), parity), before[r]);
  }
  group.RunStep(4);  // 3 is skipped
  group.Digest();
  for (int r = 0; r < 2; ++r) {
    EXPECT_NE(BytesOf(*group.storages[r], group.parity), before[r]);
    EXPECT_EQ(BytesOf(snapshots[r]->storage(), parity), before[r]);
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
