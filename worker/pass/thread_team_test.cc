#include "worker/pass/thread_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace shardmesh {
namespace {

TEST(ThreadTeamTest, EveryItemOnce_ForAnyNumberOfThreads) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadTeam team(threads);
    for (int items : {0, 1, 2, 3, 100}) {
      std::vector<std::atomic<int>> calls(items);
      team.ForEach(items, [&](int i) { calls[i].fetch_add(1); });
      for (int i = 0; i < items; ++i) ASSERT_EQ(calls[i].load(), 1) << threads << " threads, item " << i;
    }
  }
}

// What an item writes with ordinary stores is seen by the caller after ForEach, and by the next round's items.
TEST(ThreadTeamTest, RoundsAreOrdered) {
  ThreadTeam team(4);
  std::vector<int> values(16, 0);
  for (int round = 0; round < 2000; ++round) {
    team.ForEach(16, [&](int i) { ++values[i]; });
    for (int value : values) ASSERT_EQ(value, round + 1);
  }
}

TEST(ThreadTeamTest, ATeamOfOne_WorksOnTheCallersThread) {
  ThreadTeam team(1);
  const std::thread::id self = std::this_thread::get_id();
  team.ForEach(10, [&](int) { EXPECT_EQ(std::this_thread::get_id(), self); });
}

// Items that wait for each other: two threads must really work at once.
TEST(ThreadTeamTest, ThreadsWorkAtOnce) {
  ThreadTeam team(2);
  std::atomic<int> arrived{0};
  team.ForEach(2, [&](int) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

TEST(ThreadTeamTest, EndsWithoutEverWorking) {
  for (int i = 0; i < 50; ++i) ThreadTeam team(3);
}

}  // namespace
}  // namespace shardmesh
