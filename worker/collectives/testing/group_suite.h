// The conformance suite of groups: what group.h promises, for every implementation. Include it in one file of a test,
// and instantiate GroupSuite with the implementation's family:
//
//   INSTANTIATE_TEST_SUITE_P(Local, GroupSuite, testing::Values(GroupFamily{"local", MakeLocalGroups}));
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/matchers.h"
#include "core/reduction.h"
#include "core/sync.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collectives/group.h"

namespace shardmesh {

using Groups = std::vector<std::unique_ptr<Group>>;

// How to make a group's ranks in one process: rank r with epochs[r].
struct GroupFamily {
  std::string name;
  std::function<Groups(const std::vector<uint64_t>& epochs)> make;
};
inline void PrintTo(const GroupFamily& family, std::ostream* out) { *out << family.name; }

class GroupSuite : public testing::TestWithParam<GroupFamily> {
 protected:
  static constexpr absl::Duration kPlenty = absl::Seconds(60), kShort = absl::Milliseconds(150);

  Groups Make(int size, uint64_t epoch = 5) const { return GetParam().make(std::vector<uint64_t>(size, epoch)); }

  // Calls body(group) for every rank, each on a thread of its own; those that `absent` names are left out.
  static void OnEveryRank(Groups& groups, const std::function<void(Group&)>& body, int absent = -1) {
    std::vector<std::thread> threads;
    for (auto& group : groups) {
      if (group->rank() == absent) continue;
      threads.emplace_back([&body, &group] { body(*group); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // A byte that says where it comes from and where it goes.
  static char ByteOf(int from, int to, int64_t i) { return static_cast<char>(31 * from + 7 * to + 13 * i + i / 251); }
};

inline constexpr int kSuiteRanks[] = {1, 2, 3, 4, 7};
inline constexpr int64_t kSuiteElements[] = {0, 1, 7, 1000, 100003};

TEST_P(GroupSuite, AllGather_GivesEverybodysToAll) {
  for (const int size : kSuiteRanks) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        std::vector<char> mine(n), all(n * size + 1, 77);
        for (int64_t i = 0; i < n; ++i) mine[i] = ByteOf(group.rank(), 0, i);
        ASSERT_OK(group.AllGather(mine.data(), all.data(), n, kPlenty));
        for (int64_t i = 0; i < n * size; ++i) ASSERT_EQ(all[i], ByteOf(static_cast<int>(i / n), 0, i % n)) << i;
        ASSERT_EQ(all[n * size], 77);
      }
    });
  }
}

TEST_P(GroupSuite, AllGather_MayBeInPlace) {
  for (const int size : kSuiteRanks) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        std::vector<char> all(n * size);
        char* mine = all.data() + group.rank() * n;
        for (int64_t i = 0; i < n; ++i) mine[i] = ByteOf(group.rank(), 0, i);
        ASSERT_OK(group.AllGather(mine, all.data(), n, kPlenty));
        for (int64_t i = 0; i < n * size; ++i) ASSERT_EQ(all[i], ByteOf(static_cast<int>(i / n), 0, i % n)) << i;
      }
    });
  }
}

TEST_P(GroupSuite, AllToAll_GivesEachItsPiece) {
  for (const int size : kSuiteRanks) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        std::vector<char> mine(n * size), theirs(n * size + 1, 77);
        for (int64_t i = 0; i < n * size; ++i) mine[i] = ByteOf(group.rank(), static_cast<int>(i / n), i % n);
        ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), n, kPlenty));
        for (int64_t i = 0; i < n * size; ++i) {
          ASSERT_EQ(theirs[i], ByteOf(static_cast<int>(i / n), group.rank(), i % n)) << i;
        }
        ASSERT_EQ(theirs[n * size], 77);
      }
    });
  }
}

TEST_P(GroupSuite, Broadcast_GivesTheRootsToAll) {
  for (const int size : kSuiteRanks) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        for (const int root : {0, size - 1}) {
          std::vector<char> memory(n);
          for (int64_t i = 0; i < n; ++i) memory[i] = ByteOf(group.rank(), root, i);
          ASSERT_OK(group.Broadcast(memory.data(), n, root, kPlenty));
          for (int64_t i = 0; i < n; ++i) ASSERT_EQ(memory[i], ByteOf(root, root, i)) << i;
        }
      }
    });
  }
}

// Numbers whose sums depend on the order in which they are added.
inline float SuiteNumber(int slot, int64_t i) {
  const auto mixed = static_cast<uint32_t>(i * 2654435761u + slot * 40503u);
  return std::ldexp(static_cast<float>(static_cast<int32_t>(mixed)), static_cast<int>(mixed >> 7 & 15) - 40);
}
inline void PutNumber(Format format, float x, int64_t i, std::vector<char>& to) {
  if (format == Format::kFp32) {
    std::memcpy(&to[4 * i], &x, 4);
  } else {
    const uint16_t half = FloatToBf16Rne(x);
    std::memcpy(&to[2 * i], &half, 2);
  }
}
inline float StoredNumber(Format format, float x) {
  return format == Format::kFp32 ? x : Bf16ToFloat(FloatToBf16Rne(x));
}

// Who holds which of `slots` slots, unevenly; not every rank holds one.
inline std::vector<int> SuiteHolders(int slots, int size, int arrangement) {
  std::vector<int> holders(slots);
  for (int s = 0; s < slots; ++s) {
    holders[s] = arrangement == 0 ? s * size / slots : arrangement == 1 ? (s * 5 + 1) % size : s * s % ((size + 1) / 2);
  }
  return holders;
}

TEST_P(GroupSuite, ReduceScatter_AddsAsATreeOverSlots_WhoeverHoldsThem) {
  for (const int size : kSuiteRanks) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        if (n > 1000 && size > 4) continue;  // every length and every size is met
        for (const Format format : {Format::kFp32, Format::kBf16}) {
          for (const auto& [slots, arrangement] : {std::pair(size, 0), {1, 1}, {size + 3, 1}, {6, 2}}) {
            const std::vector<int> holders = SuiteHolders(slots, size, arrangement);
            std::vector<std::vector<char>> memory;
            std::vector<const void*> mine;
            for (int s = 0; s < slots; ++s) {
              if (holders[s] != group.rank()) continue;
              memory.emplace_back(n * size * 4);
              for (int64_t i = 0; i < n * size; ++i) PutNumber(format, SuiteNumber(s, i), i, memory.back());
            }
            for (const auto& each : memory) mine.push_back(each.data());
            std::vector<float> piece(n + 1, 77);
            ASSERT_OK(group.ReduceScatter({format, holders, mine, n}, piece.data(), kPlenty));
            for (int64_t i = 0; i < n; ++i) {
              const float sum = TreeSum<float>(
                  slots, [&](int s) { return StoredNumber(format, SuiteNumber(s, group.rank() * n + i)); });
              ASSERT_EQ(FloatBits(piece[i]), FloatBits(sum)) << i << " of rank " << group.rank();
            }
            ASSERT_EQ(piece[n], 77);
          }
        }
      }
    });
  }
}

TEST_P(GroupSuite, AllReduce_OfShortVectors) {
  for (const int size : kSuiteRanks) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      const int rank = group.rank();
      const float nan = rank == size - 1 ? std::nanf("") : 1.0f;
      std::vector<float> values = {static_cast<float>(rank), -1.0f - static_cast<float>(rank), nan};
      ASSERT_OK(group.AllReduceMax(absl::MakeSpan(values), kPlenty));
      EXPECT_EQ(values[0], static_cast<float>(size - 1));
      EXPECT_EQ(values[1], -1);
      EXPECT_TRUE(std::isnan(values[2]));
      std::vector<float> sums(100);
      for (int i = 0; i < 100; ++i) sums[i] = SuiteNumber(rank, i);
      ASSERT_OK(group.AllReduceSum(absl::MakeSpan(sums), kPlenty));
      for (int i = 0; i < 100; ++i) {
        EXPECT_EQ(sums[i], TreeSum<float>(size, [&](int from) { return SuiteNumber(from, i); }));
      }
      ASSERT_OK(group.Barrier(kPlenty));
    });
  }
}

// A long row of calls of all kinds and sizes, in an order that all ranks draw from one seed.
TEST_P(GroupSuite, ManyCalls_OneAfterTheOther) {
  constexpr uint64_t kSeed = 20240607;
  Groups groups = Make(3);
  OnEveryRank(groups, [&](Group& group) {
    std::mt19937_64 random(kSeed);
    for (int call = 0; call < 300; ++call) {
      const auto n = static_cast<int64_t>(random() % 300);
      const int root = static_cast<int>(random() % 3);
      SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", call ", call));
      std::vector<char> mine(3 * n), theirs(3 * n);
      for (int64_t i = 0; i < 3 * n; ++i) mine[i] = ByteOf(group.rank(), call, i);
      switch (random() % 4) {
        case 0:
          ASSERT_OK(group.AllGather(mine.data(), theirs.data(), n, kPlenty));
          for (int64_t i = 0; i < 3 * n; ++i) ASSERT_EQ(theirs[i], ByteOf(static_cast<int>(i / n), call, i % n));
          break;
        case 1:
          ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), n, kPlenty));
          for (int64_t i = 0; i < 3 * n; ++i) {
            ASSERT_EQ(theirs[i], ByteOf(static_cast<int>(i / n), call, group.rank() * n + i % n));
          }
          break;
        case 2:
          ASSERT_OK(group.Broadcast(mine.data(), n, root, kPlenty));
          for (int64_t i = 0; i < n; ++i) ASSERT_EQ(mine[i], ByteOf(root, call, i));
          break;
        default:
          ASSERT_OK(group.Barrier(kPlenty));
      }
    }
  });
}

// ---- What goes wrong. ----

TEST_P(GroupSuite, WrongArguments_AreRefused_AndTheGroupGoesOn) {
  Groups groups = Make(2);
  OnEveryRank(groups, [&](Group& group) {
    std::vector<float> memory(8);
    char* bytes = reinterpret_cast<char*>(memory.data());
    const auto refused = [](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    };
    refused(group.AllGather(bytes, bytes + 16, -1, kPlenty));
    refused(group.AllGather(nullptr, bytes, 8, kPlenty));
    refused(group.AllGather(bytes + 1, bytes, 8, kPlenty));
    refused(group.AllToAll(bytes, bytes + 8, 8, kPlenty));
    refused(group.Broadcast(bytes, 8, 2, kPlenty));
    refused(group.Broadcast(bytes, 8, -1, kPlenty));
    const void* slot[] = {memory.data() + 4};
    const int mine[] = {group.rank()}, foreign[] = {1 - group.rank()}, nobody[] = {2};
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
  const int first[] = {0, 1, 2}, second[] = {2, 1, 0};
  const auto gather = [](int64_t bytes) {
    return Call([=](Group& group, char* memory) { return group.AllGather(memory, memory + 64, bytes, kPlenty); });
  };
  const auto cast = [](int root) {
    return Call([=](Group& group, char* memory) { return group.Broadcast(memory, 8, root, kPlenty); });
  };
  const auto sum = [](const int* holders) {
    return Call([=](Group& group, char* memory) {
      const void* slots[] = {memory + 64};
      return group.ReduceScatter({Format::kFp32, {holders, 3}, slots, 2}, reinterpret_cast<float*>(memory), kPlenty);
    });
  };
  const std::pair<Call, Call> pairs[] = {
      {gather(8), gather(16)}, {gather(8), cast(0)}, {cast(0), cast(1)}, {sum(first), sum(second)}};
  for (const auto& [usual, odd] : pairs) {
    Groups groups = Make(3);
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
  Groups groups = GetParam().make({5, 5, 6});
  OnEveryRank(groups, [&](Group& group) {
    const absl::Status status = group.Barrier(absl::Seconds(5));
    EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted))
        << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("epoch"));
  });
}

TEST_P(GroupSuite, ARankThatDoesNotCome_IsNamedInTime) {
  for (const int absent : {0, 2}) {
    Groups groups = Make(3);
    const absl::Time begin = absl::Now();
    int named = 0;
    Mutex mu;
    OnEveryRank(
        groups,
        [&](Group& group) {
          char byte = 0, all[3];
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
    EXPECT_LT(absl::Now() - begin, absl::Seconds(20));  // of 60 that a barrier has
    char byte = 0, all[3];
    EXPECT_EQ(groups[absent]->AllGather(&byte, all, 1, kShort).code(), absl::StatusCode::kAborted);
  }
}

TEST_P(GroupSuite, Abort_EndsTheWaitsOfAll) {
  Groups groups = Make(3);
  const absl::Time begin = absl::Now();
  OnEveryRank(groups, [&](Group& group) {
    if (group.rank() == 1) return group.Abort("rank 1 has had enough");
    const absl::Status status = group.Barrier(kPlenty);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("rank 1 has had enough"));
  });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
}

}  // namespace shardmesh
