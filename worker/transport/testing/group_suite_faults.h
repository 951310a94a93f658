// The part of the conformance suite of groups that is about errors; group_suite.h includes it.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/transport/testing/group_family.h"

namespace shardmesh {

TEST_P(GroupSuite, WrongArguments_AreRefused_AndTheGroupGoesOn) {
  Groups groups = MakeThree();
  OnEveryRank(groups, [&](Group& group) {
    std::vector<float> memory(16);
    char* bytes = reinterpret_cast<char*>(memory.data());
    const auto refused = [](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    };
    refused(group.AllGather(bytes, bytes + 16, -1, kPlenty));
    refused(group.AllGather(nullptr, bytes, 8, kPlenty));
    refused(group.AllGather(bytes + 1, bytes, 8, kPlenty));
    refused(group.AllToAll(bytes, bytes + 8, 8, kPlenty));
    refused(group.Broadcast(bytes, 8, group.size(), kPlenty));
    refused(group.Broadcast(bytes, 8, -1, kPlenty));
    const void* slot[] = {memory.data() + 4};
    const int mine[] = {group.rank()}, foreign[] = {1 - group.rank()}, nobody[] = {group.size()};
    refused(group.ReduceScatter({Format::kFp32, mine, slot, 2}, memory.data() + 6, kPlenty));
    refused(group.ReduceScatter({Format::kFp32, mine, {}, 2}, memory.data(), kPlenty));
    refused(group.ReduceScatter({Format::kFp32, foreign, slot, 2}, memory.data(), kPlenty));
    refused(group.ReduceScatter({Format::kFp32, nobody, {}, 2}, memory.data(), kPlenty));
    refused(group.ReduceScatter({Format::kFp32, {}, {}, 2}, memory.data(), kPlenty));
    refused(group.ReduceScatter({Format::kBf16Sr, mine, slot, 2}, memory.data(), kPlenty));
    EXPECT_OK(group.Barrier(kPlenty));
  });
}

// One rank does something else: whoever sees it says who and what; nobody's call succeeds, and the group is over.
TEST_P(GroupSuite, DifferentCalls_EndInErrorsThatNameThem) {
  using Call = std::function<absl::Status(Group&, char*)>;
  const auto gather = [](int64_t bytes) {
    return Call([=](Group& group, char* memory) { return group.AllGather(memory, memory + 64, bytes, kPlenty); });
  };
  const auto cast = [](int root) {
    return Call([=](Group& group, char* memory) { return group.Broadcast(memory, 8, root, kPlenty); });
  };
  const auto sum = [](bool forward) {
    return Call([=](Group& group, char* memory) {
      const void* slots[] = {memory + 64};
      std::vector<int> holders;
      for (int i = 0; i < group.size(); ++i) holders.push_back(forward ? i : group.size() - 1 - i);
      return group.ReduceScatter({Format::kFp32, holders, slots, 2}, reinterpret_cast<float*>(memory), kPlenty);
    });
  };
  const std::pair<Call, Call> pairs[] = {
      {gather(8), gather(16)}, {gather(8), cast(0)}, {cast(0), cast(1)}, {sum(true), sum(false)}};
  for (const auto& [usual, odd] : pairs) {
    Groups groups = MakeThree();
    int named = 0;
    Mutex mu;
    OnEveryRank(groups, [&, &usual = usual, &odd = odd](Group& group) {
      alignas(8) char memory[256] = {};
      const absl::Status status = (group.rank() == 1 ? odd : usual)(group, memory);
      EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted))
          << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("rank "));
      EXPECT_EQ(group.Barrier(kPlenty).code(), absl::StatusCode::kAborted);
      MutexLock lock(mu);
      named += status.code() == absl::StatusCode::kFailedPrecondition;
    });
    EXPECT_GE(named, 1);
  }
}

TEST_P(GroupSuite, AnotherEpoch_IsAnError) {
  std::vector<uint64_t> epochs(MakeThree().size(), 5);
  epochs.back() = 6;
  Groups groups = GetParam().make(epochs);
  OnEveryRank(groups, [&](Group& group) {
    const absl::Status status = group.Barrier(absl::Seconds(5));
    EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted))
        << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("epoch"));
  });
}

TEST_P(GroupSuite, ARankThatDoesNotCome_IsNamedInTime) {
  for (const int absent : {0, 2}) {
    Groups groups = MakeThree();
    const absl::Time begin = MonotonicNow();
    int named = 0;
    Mutex mu;
    OnEveryRank(
        groups,
        [&](Group& group) {
          char byte = 0, all[8];
          const absl::Status status = group.AllGather(&byte, all, 1, kShort);
          EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted))
              << status;
          EXPECT_THAT(std::string(status.message()), testing::HasSubstr(absl::StrCat("rank ", absent)));
          EXPECT_EQ(group.Barrier(kPlenty).code(), absl::StatusCode::kAborted);
          MutexLock lock(mu);
          named += status.code() == absl::StatusCode::kUnavailable;
        },
        absent);
    EXPECT_GE(named, 1);
    EXPECT_LT(MonotonicNow() - begin, absl::Seconds(20));  // of 60 that a barrier has
    char byte = 0, all[8];
    EXPECT_EQ(groups[absent]->AllGather(&byte, all, 1, kShort).code(), absl::StatusCode::kAborted);
  }
}

TEST_P(GroupSuite, Abort_EndsTheWaitsOfAll) {
  Groups groups = MakeThree();
  const absl::Time begin = MonotonicNow();
  OnEveryRank(groups, [&](Group& group) {
    if (group.rank() == 1) return group.Abort("rank 1 has had enough");
    const absl::Status status = group.Barrier(kPlenty);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("rank 1 has had enough"));
  });
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(20));
}

// Abort comes from a thread of its own, in the middle of whatever the ranks do.
TEST_P(GroupSuite, Abort_InTheMiddleOfCalls_EndsThem) {
  constexpr int64_t kBytes = 20000;
  for (int round = 0; round < 8; ++round) {
    Groups groups = MakeThree();
    std::atomic<int> calls = 0;
    std::thread aborter([&] {
      const absl::Time until = MonotonicNow() + kPlenty;
      while (calls < 7 * round && MonotonicNow() < until) std::this_thread::yield();
      groups[round % groups.size()]->Abort("enough");
    });
    OnEveryRank(groups, [&](Group& group) {
      std::vector<char> mine(group.size() * kBytes), theirs(group.size() * kBytes);
      absl::Status status;
      while (status.ok()) {
        status = group.AllGather(mine.data(), theirs.data(), kBytes, kPlenty);
        if (status.ok()) status = group.AllToAll(mine.data(), theirs.data(), kBytes, kPlenty);
        ++calls;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("enough"));
    });
    aborter.join();
  }
}

// A rank that is destroyed takes nothing from calls that it made; its peers' next one fails, and says who left.
TEST_P(GroupSuite, ARankThatLeaves_IsMissedAtTheNextCallOnly) {
  constexpr int64_t kBytes = 300000;
  constexpr int kCalls = 3;
  for (const int leaving : {0, 2}) {
    Groups groups = MakeThree();
    std::atomic<int> stayed = 0;
    OnEveryRank(groups, [&](Group& group) {
      const int rank = group.rank();
      std::vector<char> mine(kBytes), all(group.size() * kBytes);
      for (int call = 0; call < kCalls; ++call) {
        ASSERT_OK(group.AllGather(mine.data(), all.data(), kBytes, kPlenty)) << "rank " << rank << ", call " << call;
      }
      if (rank == leaving) return groups[rank].reset();
      const absl::Time until = MonotonicNow() + kPlenty;  // an error of one ends the calls of others
      for (++stayed; stayed < group.size() - 1 && MonotonicNow() < until;) std::this_thread::yield();
      const absl::Status status = group.AllGather(mine.data(), all.data(), kBytes, absl::Seconds(2));
      EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted)) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(absl::StrCat("rank ", leaving)));
    });
  }
}

// All leave after their last call, each as soon as it can: all calls of all succeed.
TEST_P(GroupSuite, AllLeave_AfterTheirLastCall) {
  constexpr int64_t kBytes = 300000;
  for (int round = 0; round < 10; ++round) {
    Groups groups = MakeThree();
    OnEveryRank(groups, [&](Group& group) {
      const int rank = group.rank();
      std::vector<char> mine(kBytes, static_cast<char>(rank)), all(group.size() * kBytes);
      ASSERT_OK(group.AllGather(mine.data(), all.data(), kBytes, kPlenty)) << "rank " << rank << ", round " << round;
      for (int peer = 0; peer < group.size(); ++peer) ASSERT_EQ(all[(peer + 1) * kBytes - 1], peer);
      groups[rank].reset();
    });
  }
}

}  // namespace shardmesh
