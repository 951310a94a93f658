#include "worker/transport/group_queue.h"

#include <atomic>
#include <vector>

#include "core/base/matchers.h"
#include "gtest/gtest.h"
#include "worker/transport/local_group.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kPlenty = absl::Seconds(60);

TEST(GroupQueue, Calls_AreDoneInOrder_WhileTheCallerGoesOn) {
  auto hub = std::make_shared<LocalHub>(2);
  GroupQueue first(std::make_unique<LocalGroup>(hub, 0, 1)), second(std::make_unique<LocalGroup>(hub, 1, 1));
  constexpr int kCalls = 50;
  std::vector<int> all[2] = {std::vector<int>(2 * kCalls), std::vector<int>(2 * kCalls)};
  int mine[2][kCalls];
  std::vector<GroupCall> calls[2];
  GroupQueue* queues[2] = {&first, &second};
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < kCalls; ++i) {
      mine[rank][i] = 1000 * rank + i;
      calls[rank].push_back(queues[rank]->Submit([from = &mine[rank][i], to = &all[rank][2 * i]](Group& group) {
        return group.AllGather(from, to, sizeof(int), kPlenty);
      }));
    }
    EXPECT_TRUE(rank == 1 || !calls[0].front().Done());  // nothing is done without the peer
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (const GroupCall& call : calls[rank]) EXPECT_OK(call.Wait(kPlenty));
    for (int i = 0; i < kCalls; ++i) {
      EXPECT_EQ(all[rank][2 * i], i);
      EXPECT_EQ(all[rank][2 * i + 1], 1000 + i);
    }
  }
}

TEST(GroupQueue, AWaitThatIsTooShort_LeavesTheCallAlone) {
  auto hub = std::make_shared<LocalHub>(2);
  GroupQueue queue(std::make_unique<LocalGroup>(hub, 0, 1));
  LocalGroup peer(hub, 1, 1);
  const GroupCall call = queue.Submit([](Group& group) { return group.Barrier(kPlenty); });
  EXPECT_EQ(call.Wait(absl::Milliseconds(1)).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_OK(peer.Barrier(kPlenty));
  EXPECT_OK(call.Wait(kPlenty));
  EXPECT_TRUE(call.Done());
}

TEST(GroupQueue, AfterAFailedCall_ThoseBehindItFail) {
  auto hub = std::make_shared<LocalHub>(2);
  GroupQueue queue(std::make_unique<LocalGroup>(hub, 0, 1));
  const GroupCall late = queue.Submit([](Group& group) { return group.Barrier(absl::Milliseconds(20)); });
  const GroupCall behind = queue.Submit([](Group& group) { return group.Barrier(kPlenty); });
  EXPECT_EQ(late.Wait(kPlenty).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(behind.Wait(kPlenty).code(), absl::StatusCode::kAborted);
}

TEST(GroupQueue, Closed_EndsTheCallsThatAreLeft) {
  auto hub = std::make_shared<LocalHub>(2);
  LocalGroup peer(hub, 1, 1);
  std::vector<GroupCall> calls;
  {
    GroupQueue queue(std::make_unique<LocalGroup>(hub, 0, 1));
    for (int i = 0; i < 3; ++i) calls.push_back(queue.Submit([](Group& group) { return group.Barrier(kPlenty); }));
  }
  for (const GroupCall& call : calls) EXPECT_EQ(call.Wait(absl::ZeroDuration()).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(peer.Barrier(kPlenty).code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace shardmesh
