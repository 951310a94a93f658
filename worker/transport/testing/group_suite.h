// The conformance suite of groups: what group.h promises, for every implementation. Include it in one file of a test,
// and instantiate GroupSuite with the implementation's family:
//
//   INSTANTIATE_TEST_SUITE_P(Local, GroupSuite, testing::Values(GroupFamily{"local", Make}));
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/base/reduction.h"
#include "gtest/gtest.h"
#include "worker/transport/testing/group_family.h"
#include "worker/transport/testing/group_suite_faults.h"

namespace shardmesh {

// Under a sanitizer fewer: still more than one part of any staging.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int64_t kMostSuiteElements = 40009;
#else
inline constexpr int64_t kMostSuiteElements = 100003;
#endif
inline constexpr int64_t kSuiteElements[] = {0, 1, 7, 1000, kMostSuiteElements};

TEST_P(GroupSuite, AllGather_GivesEverybodysToAll) {
  for (const int size : Sizes()) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        std::vector<char> mine(n), all(n * size + 1, 77);
        for (int64_t i = 0; i < n; ++i) mine[i] = ByteOf(group.rank(), 0, i);
        ASSERT_OK(group.AllGather(mine.data(), all.data(), n, kPlenty));
        const auto right = [&](int64_t i) { return all[i] == ByteOf(static_cast<int>(i / n), 0, i % n); };
        ASSERT_EQ(FirstWrong(n * size, right), n * size);
        ASSERT_EQ(all[n * size], 77);
      }
    });
  }
}

TEST_P(GroupSuite, AllGather_MayBeInPlace) {
  for (const int size : Sizes()) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        std::vector<char> all(n * size);
        char* mine = all.data() + group.rank() * n;
        for (int64_t i = 0; i < n; ++i) mine[i] = ByteOf(group.rank(), 0, i);
        ASSERT_OK(group.AllGather(mine, all.data(), n, kPlenty));
        const auto right = [&](int64_t i) { return all[i] == ByteOf(static_cast<int>(i / n), 0, i % n); };
        ASSERT_EQ(FirstWrong(n * size, right), n * size);
      }
    });
  }
}

TEST_P(GroupSuite, AllToAll_GivesEachItsPiece) {
  for (const int size : Sizes()) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        std::vector<char> mine(n * size), theirs(n * size + 1, 77);
        for (int64_t i = 0; i < n * size; ++i) mine[i] = ByteOf(group.rank(), static_cast<int>(i / n), i % n);
        ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), n, kPlenty));
        const auto right = [&](int64_t i) { return theirs[i] == ByteOf(static_cast<int>(i / n), group.rank(), i % n); };
        ASSERT_EQ(FirstWrong(n * size, right), n * size);
        ASSERT_EQ(theirs[n * size], 77);
      }
    });
  }
}

TEST_P(GroupSuite, Broadcast_GivesTheRootsToAll) {
  for (const int size : Sizes()) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      for (const int64_t n : kSuiteElements) {
        for (const int root : {0, size - 1}) {
          std::vector<char> memory(n);
          for (int64_t i = 0; i < n; ++i) memory[i] = ByteOf(group.rank(), root, i);
          ASSERT_OK(group.Broadcast(memory.data(), n, root, kPlenty));
          ASSERT_EQ(FirstWrong(n, [&](int64_t i) { return memory[i] == ByteOf(root, root, i); }), n);
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
  for (const int size : Sizes()) {
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
            const auto right = [&, count = slots](int64_t i) {
              const auto number = [&](int s) { return StoredNumber(format, SuiteNumber(s, group.rank() * n + i)); };
              return FloatBits(piece[i]) == FloatBits(TreeSum<float>(count, number));
            };
            ASSERT_EQ(FirstWrong(n, right), n) << " of rank " << group.rank();
            ASSERT_EQ(piece[n], 77);
          }
        }
      }
    });
  }
}

TEST_P(GroupSuite, AllReduce_OfShortVectors) {
  for (const int size : Sizes()) {
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
  Groups groups = MakeThree();
  const int size = groups[0]->size();
  OnEveryRank(groups, [&](Group& group) {
    std::mt19937_64 random(kSeed);
    for (int call = 0; call < 300; ++call) {
      const auto n = static_cast<int64_t>(random() % 300);
      const int root = static_cast<int>(random() % size);
      SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", call ", call));
      std::vector<char> mine(size * n), theirs(size * n);
      for (int64_t i = 0; i < size * n; ++i) mine[i] = ByteOf(group.rank(), call, i);
      switch (random() % 4) {
        case 0: {
          ASSERT_OK(group.AllGather(mine.data(), theirs.data(), n, kPlenty));
          const auto right = [&](int64_t i) { return theirs[i] == ByteOf(static_cast<int>(i / n), call, i % n); };
          ASSERT_EQ(FirstWrong(size * n, right), size * n);
          break;
        }
        case 1: {
          ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), n, kPlenty));
          const auto right = [&](int64_t i) {
            return theirs[i] == ByteOf(static_cast<int>(i / n), call, group.rank() * n + i % n);
          };
          ASSERT_EQ(FirstWrong(size * n, right), size * n);
          break;
        }
        case 2:
          ASSERT_OK(group.Broadcast(mine.data(), n, root, kPlenty));
          ASSERT_EQ(FirstWrong(n, [&](int64_t i) { return mine[i] == ByteOf(root, call, i); }), n);
          break;
        default:
          ASSERT_OK(group.Barrier(kPlenty));
      }
    }
  });
}

}  // namespace shardmesh
